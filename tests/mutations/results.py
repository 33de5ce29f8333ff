"""Verdicts in a JSON file, and their summary."""

import datetime
import json
from pathlib import Path

from tests.mutations import suite
from tests.mutations.mutants import Mutant


class Results:
    """Verdicts in a JSON file; those of another tree, other versions or other tests are dropped."""

    def __init__(self, path: Path, identity: dict):
        found = json.loads(path.read_text()) if path.exists() else {}
        same = all(found.get(key) == value for key, value in identity.items())
        self.path, self.identity = path, identity
        self.mutants = found["mutants"] if found and same else {}

    def verdict(self, mutant: Mutant, name: str) -> dict | None:
        return self.mutants.get(mutant.name, {}).get(name)

    def is_killed(self, mutant: Mutant) -> bool:
        """Returns whether the default suite killed a mutant."""
        return self.mutants[mutant.name]["default"]["killed"]

    def add(self, mutant: Mutant, name: str, verdict: dict) -> None:
        description = {"file": mutant.file, "line": mutant.line, "change": mutant.change}
        self.mutants.setdefault(mutant.name, description)[name] = verdict
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        text = json.dumps(self.identity | {"date": date, "mutants": self.mutants}, indent=1, ensure_ascii=False)
        unfinished = self.path.with_suffix(".unfinished.jsonl")
        unfinished.write_text(text + "\n")
        unfinished.replace(self.path)

    def discard_unreliable(self, copy: suite.Copy, name: str, judged: list[Mutant]) -> None:
        """Marks verdicts as undecided if their test also fails without a mutant, run together with the others."""
        verdicts = {m: self.verdict(m, name) for m in judged}
        killers = {v["test"] for v in verdicts.values() if v and v["how"] == "killed"}
        failing = suite.failing(copy, sorted(killers)) if killers else []
        for mutant, verdict in verdicts.items():
            if verdict and verdict["test"] in failing:
                self.add(mutant, name, verdict | {"killed": False, "how": "undecided: fails without the mutant, too"})

    def summary(self, chosen: list[Mutant]) -> int:
        """Prints the verdicts; returns 1 if a named mutant survived, or only `all` killed a random one, else 0."""
        missed = []
        for mutant in chosen:
            found = {name: v for name in ("default", "all") if (v := self.verdict(mutant, name)) is not None}
            for name, v in found.items():
                print(f"{name:<8}{v['how']:<30}{v['seconds']:>6.0f} s  {mutant.name}  {v['test']}")
            if not self.is_killed(mutant) and (mutant.is_named or any(v["killed"] for v in found.values())):
                missed.append(mutant)
        for kind, is_named in ("named", True), ("random", False):
            mutants = [m for m in chosen if m.is_named == is_named]
            print(f"the default suite kills {sum(map(self.is_killed, mutants))} of {len(mutants)} {kind} mutants")
        print("\n".join([f"MISSED: {mutant.name}" for mutant in missed]), f"verdicts are in {self.path}", sep="\n")
        return bool(missed)
