"""Aligned printed lines, and Markdown tables of generated pages; the JSON results have the same numbers."""

_COLUMNS = (
    ("case", 30),
    ("ours ms", 9),
    ("Qwix ms", 9),
    ("ratio", 7),
    ("target", 7),
    ("", 7),
    ("SNR ours/Qwix dB", 16),
    ("temp/input", 11),
)


def header() -> str:
    return _line(title for title, _ in _COLUMNS)


def line(row: dict) -> str:
    """The printed line of a row: "-" for what was not measured, "missed" after a missed memory target."""
    missed = row["temp_over_input"] is not None and row["temp_over_input"] > row["temp_target"]
    return _line(
        (
            row["case"],
            _number(row["ours_median_ms"], 2),
            _number(row["qwix_median_ms"], 2),
            _number(row["ratio"], 2),
            "-" if row["target"] is None else f">= {row['target']:g}",
            verdict(row["met"]),
            f"{_number(row['ours_snr_db'], 2)} / {_number(row['qwix_snr_db'], 2)}",
            _number(row["temp_over_input"], 3) + (" missed" if missed else ""),
        )
    )


def markdown(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def verdict(met: bool | None) -> str:
    return {True: "met", False: "missed", None: "-"}[met]


def _line(cells) -> str:
    first, *rest = zip(cells, _COLUMNS, strict=True)
    padded = [first[0].ljust(first[1][1]), *(cell.rjust(width) for cell, (_, width) in rest)]
    return " | ".join(padded).rstrip()


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
