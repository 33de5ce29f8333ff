"""The command line: output of every command as text and as JSON, exit codes and errors."""

import json
import os
import shlex
import subprocess
import sys

import pytest
from tables import EACH_FORMAT, EACH_RECIPE

import scaledot as sd
from scaledot import cli
from scaledot.cli import formats, main, tune
from scaledot.kernels.hopper import autotune
from scaledot.plan import compile_process, fit
from scaledot.plan.gemm_kinds import find_recipe

COMMANDS = pytest.mark.parametrize("command", cli.COMMANDS)


def printed(capsys, *words: str, code: int = 0) -> str:
    assert main(list(words)) == code
    return capsys.readouterr().out


def printed_json(capsys, *words: str, code: int = 0):
    return json.loads(printed(capsys, *words, "--json", code=code))


def error_of(capsys, *words: str) -> tuple[object, str]:
    """Returns the exit code and the one line on stderr; stdout must be empty."""
    try:
        code = main(list(words))
    except SystemExit as ended:  # wrong usage
        code = ended.code
    found = capsys.readouterr()
    assert not found.out
    assert found.err.startswith("scaledot: error: ")
    assert found.err.count("\n") == 1
    return code, found.err


def help_of(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


# The program


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"scaledot {sd.__version__}\n"


def test_help_names_commands_and_exit_codes_and_ends_with_examples(capsys):
    text = help_of(capsys)
    assert all(f"    {name} " in text for name in cli.COMMANDS)
    assert cli.EXIT_CODES in text
    assert text.endswith(f"  {cli.EXAMPLES[-1]}\n")


@COMMANDS
def test_help_of_a_command_ends_with_examples(command, capsys):
    text = help_of(capsys, command)
    assert text.endswith("\n".join(f"  {example}" for example in cli._command([command]).EXAMPLES) + "\n")
    assert "--json" in text


EVERY_EXAMPLE = [*cli.EXAMPLES, *(example for name in cli.COMMANDS for example in cli._command([name]).EXAMPLES)]


@pytest.mark.parametrize("example", EVERY_EXAMPLE)
def test_examples_in_help_parse(example):
    program, *words = shlex.split(example.partition(" > ")[0])
    assert program == "scaledot"
    options = cli._parser(cli._command(words)).parse_args(words)
    assert options.command == words[0]


def test_help_and_formats_need_no_jax():
    code = f"""
import contextlib, sys
from scaledot.cli import main
for name in {list(cli.COMMANDS)}:
    with contextlib.suppress(SystemExit):
        main([name, "--help"])
main(["formats"])
print("jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"


WRONG_USAGE = {
    "": "the following arguments are required: COMMAND",
    "fromats": "`command` 'fromats' is not in the commands; did you mean 'formats'",
    "formats mxfp9": "`format` 'mxfp9' is not in FORMATS; did you mean 'mxfp8'",
    "formats mxfp8 --jsn": "unrecognized arguments: --jsn",
    "recipes nvfp5": "`recipe` 'nvfp5' is not in RECIPES; did you mean 'nvfp4'",
    "explain 8x64": "the following arguments are required: W",
    "explain 8x64 64x32": "one of the arguments --recipe --formats is required",
    "explain 8xk 64x32 --recipe mxfp8": "'8xk' must be sizes of at least 1, such as 8192x4096",
    "explain 8x64 64x32 --recipe mxpf8": "`recipe` 'mxpf8' is not in RECIPES; did you mean 'mxfp8'",
    "explain 8x64 64x32 --recipe mxfp8 --block 32": "`--block` is for `--formats`; the blocks of `--recipe`",
    "explain 8x64 32x32 --recipe mxfp8": "the last axis of `x` (8, 64) must be as long as the first of `w` (32, 32)",
    "explain 8x64 64x32 --formats bfloat16 int44": "`format` 'int44' is not in FORMATS; did you mean 'int4'",
    "explain 8x64 64x32 --formats bfloat16 mxfp8 --block 1 2 3": "`--block` takes one block for both operands or one",
    "explain 8x64 64x4x8 --formats bfloat16 int8": "`W` must be (k, n), such as 4096x14336, not 64x4x8",
    "explain 8x64 32x32 --formats bfloat16 int8": "axis 1 of lhs has 64 elements and axis 0 of rhs has 32",
    "plan --devices 8": "the following arguments are required: --model",
    "plan --model llama3-8 --devices 8": "`model` 'llama3-8' is not in the table of models; did you mean 'llama3-8b'",
    "plan --model llama3-8b --devices many": "must be a whole number of at least 1, not 'many'",
    "tune --kind unheard": "invalid choice: 'unheard'",
    "tune --layer 8 0 8": "must be a whole number of at least 1, not '0'",
}


@pytest.mark.parametrize("words", WRONG_USAGE)
def test_wrong_usage_and_bad_values_exit_with_2_and_one_line(words, capsys):
    code, line = error_of(capsys, *words.split())
    assert code == 2
    assert WRONG_USAGE[words] in line


@pytest.mark.parametrize("words", ["--debug formats mxfp9", "formats mxfp9 --debug", "formats --debug mxfp9"])
def test_debug_raises_the_exception(words):
    with pytest.raises(ValueError, match="'mxfp9' is not in FORMATS"):
        main(words.split())


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RuntimeError("the child\n  ended"), 1, "the child ended"),
        (PermissionError(13, "Permission denied", "table.json"), 1, "[Errno 13] Permission denied: 'table.json'"),
        (KeyError("lost"), 1, "KeyError: 'lost'; --debug prints the traceback"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failures_are_printed_as_one_line(error, code, line, capsys, monkeypatch):
    def run(options):
        raise error

    monkeypatch.setattr(formats, "run", run)
    assert error_of(capsys, "formats") == (code, f"scaledot: error: {line}\n")
    with pytest.raises(type(error)):
        main(["--debug", "formats"])


@pytest.mark.parametrize("words", ["formats", "formats --debug", "formats --help"])
def test_a_closed_output_pipe_is_no_error(words, capsys, monkeypatch):
    """As in `scaledot formats | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(words.split()) == 141
    assert not capsys.readouterr().err


# formats and recipes

FORMAT_KEYS = {
    *("name", "element", "scale", "block", "rule", "pow2", "codebook", "bound", "two_level", "guard", "search"),
    *("target", "scale_max", "grids", "quirks", "bits", "bits_per_element", "max", "code_dtype", "rules"),
}


def test_formats_are_listed(capsys):
    title, *rows = printed(capsys, "formats").splitlines()
    assert title.split() == ["name", "element", "scale", "block", *["scale", "rule", "bits", "per", "element", "max"]]
    assert [row.split()[0] for row in rows] == list(sd.FORMATS)
    (nvfp4,) = (row.split() for row in rows if row.startswith("nvfp4 "))
    assert " ".join(nvfp4) == "nvfp4 float4_e2m1fn float8_e4m3fn, float32 per tensor 16 multiply 4.5 6"


@pytest.mark.parametrize("format", EACH_FORMAT)
def test_a_format_is_shown(format, capsys):
    text, fields = printed(capsys, "formats", format), printed_json(capsys, "formats", format)
    assert text.startswith(f"{format}\n")
    assert fields in printed_json(capsys, "formats")["formats"]
    assert set(fields) == FORMAT_KEYS
    assert f"bits per element  {fields['bits_per_element']:g}\n" in text
    block = None if fields["block"] is None else tuple(fields["block"])
    assert (fields["element"], block) == (sd.FORMATS[format].element, sd.FORMATS[format].block)


def test_details_list_integer_range_and_codebook(capsys):
    assert "codes             -7 to 7\n" in printed(capsys, "formats", "int4")
    assert "codebook          -1, -0.6962," in printed(capsys, "formats", "nf4")


def test_recipes_are_listed(capsys):
    _, *rows = printed(capsys, "recipes").splitlines()
    assert [row.split()[0] for row in rows] == list(sd.RECIPES)
    assert "w4a16_qat            not cast                int4 1×128              straight-through" in rows
    assert [row["name"] for row in printed_json(capsys, "recipes")["recipes"]] == list(sd.RECIPES)


@pytest.mark.parametrize("recipe", EACH_RECIPE)
def test_a_recipe_is_shown_and_from_json_reads_its_json(recipe, capsys):
    name = recipe if isinstance(recipe, str) else recipe.name
    assert printed(capsys, "recipes", name) == f"{sd.RECIPES[name]}\n"
    assert sd.Recipe.from_json(printed(capsys, "recipes", name, "--json")) == sd.RECIPES[name]


# explain


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4", "w4a16_qat"])
def test_a_training_step_is_explained(recipe, capsys):
    words = ["explain", "256x128", "128x384", "--recipe", recipe]
    text, fields = printed(capsys, *words), printed_json(capsys, *words)
    problems = {problem["role"]: problem for problem in fields["problems"]}
    assert set(problems) == {"cast", "fwd", "dgrad", "wgrad"}
    assert (fields["x"], fields["w"], fields["recipe"], fields["formats"]) == ([256, 128], [128, 384], recipe, None)
    for role in ("fwd", "dgrad", "wgrad"):
        assert f"\n{role}: {problems[role]['problem']}\n" in text
    selected = [row.split()[0] for row in text.splitlines() if " selected: " in row]
    assert selected == [problem["selected"] for problem in fields["problems"]]


def test_every_kernel_has_a_verdict_and_a_reason(capsys):
    for problem in printed_json(capsys, "explain", "256x128", "128x384", "--recipe", "mxfp8")["problems"]:
        assert sum(row["verdict"] == "selected" for row in problem["kernels"]) == 1
        assert all(
            row["reason"] and row["verdict"] in ("selected", "supported", "unsupported") for row in problem["kernels"]
        )


def test_nothing_is_allocated_for_an_explanation(capsys):
    huge = f"{2**22}x{2**22}"
    assert "fwd: dot" in printed(capsys, "explain", huge, huge, "--recipe", "fp8_current")
    assert "dot mk,kn->mn" in printed(capsys, "explain", huge, huge, "--formats", "mxfp8", "mxfp8")


def test_a_matmul_of_formats_is_explained(capsys):
    words = ["explain", "8x4096", "4096x14336", "--formats", "bfloat16", "int4", "--block", "128"]
    fields = printed_json(capsys, *words)
    assert [problem["role"] for problem in fields["problems"]] == ["cast", "matmul"]
    expected = "dot mk,kn->mn: bfloat16[8,4096] x int4[4096,14336] in blocks of (128, 1) -> bfloat16"
    assert fields["problems"][1]["problem"] == expected
    assert f"\n{expected}\n" in printed(capsys, *words)


def test_each_operand_can_have_its_own_block(capsys):
    words = ["explain", "512x4096", "4096x256", "--formats", "fp8_e4m3", "fp8_e4m3", "--block", "1x128", "64x128"]
    *_, matmul = printed_json(capsys, *words)["problems"]
    operands = "fp8_e4m3[512,4096] in blocks of (128,) x fp8_e4m3[4096,256] in blocks of (128, 64)"
    assert matmul["problem"] == f"dot mk,kn->mn: {operands} -> bfloat16"


def test_dtypes_before_casts_can_be_chosen(capsys):
    words = ["explain", "256x128", "128x384", "--recipe", "mxfp8", "--dtype", "float32", "--weight-dtype", "bfloat16"]
    x, w, *_ = printed_json(capsys, *words)["problems"]
    assert x["problem"].startswith("cast float32[256,128]")
    assert w["problem"].startswith("cast bfloat16[128,384]")


def test_casts_of_differences_to_a_mean_say_so(capsys):
    x, w, *_ = printed_json(capsys, "explain", "256x128", "128x384", "--recipe", "nvfp4_plus")["problems"]
    assert x["problem"].startswith("cast float32[256,128] (differences to a mean) -> nvfp4_eden")
    assert "differences" not in w["problem"]
    reasons = {kernel["kernel"]: kernel["reason"] for kernel in x["kernels"]}
    assert reasons["hopper_cast_microscaled"] == "it does not subtract a mean"


# plan: compilation is replaced by estimates here; tests/test_plan.py compiles


@pytest.fixture
def _estimated_programs(monkeypatch):
    def estimate_jobs(jobs):
        estimates = {
            "block": lambda job: fit.estimate_block(job.setup, find_recipe(job.recipe)),
            "head": lambda job: fit.estimate_head(job.setup),
        }
        return [estimates[job.module](job) for job in jobs]

    monkeypatch.setattr(compile_process, "compile_jobs", estimate_jobs)


PLAN_KEYS = {
    *("environment", "model", "mesh", "mesh_reason", "compiled_mesh", "batch", "sequence", "sequence_parallel"),
    *("tokens_per_step", "fits", "rates", "recipes", "proposal"),
}


@pytest.mark.usefixtures("_estimated_programs")
def test_a_plan_that_fits_proposes_nothing(capsys, tmp_path):
    words = ["plan", "--model", "llama3-8b", "--devices", "64", "--recipes", "fp8_current"]
    text, fields = printed(capsys, *words), printed_json(capsys, *words)
    assert set(fields) == PLAN_KEYS
    assert fields["fits"]
    assert fields["proposal"] is None
    assert list(fields["recipes"]) == ["bf16", "fp8_current"]
    assert "does not fit" not in text
    path = tmp_path / "plan.json"
    assert printed(capsys, *words, "--json", str(path)) == text
    del fields["environment"]
    assert fields.items() <= json.loads(path.read_text()).items()


@pytest.mark.usefixtures("_estimated_programs")
@pytest.mark.parametrize(
    ("words", "code", "mesh", "proposed"),
    [
        # The chosen mesh does not fit; another one with the same number of devices does.
        ("llama3-70b --devices 128 --device h100 --recipes bf16", 0, (4, 8, 4), (1, 16, 8)),
        # The mesh of --mesh does not fit.
        ("llama3-70b --mesh dp=8,tp=8 --recipes fp8_current", 1, (8, 1, 8), (4, 2, 8)),
        # No mesh of 8 devices fits; the smallest number of devices that fits is proposed.
        ("llama3-70b --devices 8 --recipes bf16 fp8_current", 1, (1, 2, 4), (1, 2, 8)),
    ],
)
def test_a_mesh_that_fits_is_proposed(words, code, mesh, proposed, capsys):
    words = ["plan", "--model", *words.split()]
    fields, text = printed_json(capsys, *words, code=code), printed(capsys, *words, code=code)
    proposal = fields["proposal"]
    assert fields["mesh"] == dict(zip(("dp", "fsdp", "tp"), mesh, strict=True))
    assert proposal["mesh"] == dict(zip(("dp", "fsdp", "tp"), proposed, strict=True))
    assert (fields["fits"], proposal["fits"]) == (False, True)
    name = ",".join(f"{axis}={size}" for axis, size in proposal["mesh"].items())
    assert f" GB\nproposed: {name}\n\n" in text
    assert text.count("comparison with bf16") == 2
    capacity = 1e9 * fields["rates"]["memory"]["gb"]
    required = words[words.index("--recipes") + 1 :]
    assert any(sum(fields["recipes"][name]["memory_bytes"].values()) > capacity for name in required)
    assert all(sum(proposal["recipes"][name]["memory_bytes"].values()) <= capacity for name in required)


@pytest.mark.usefixtures("_estimated_programs")
@pytest.mark.parametrize(("devices", "hint"), [(64, ", but dp=1,fsdp=16,tp=4 would with --sequence-parallel"), (8, "")])
def test_a_proposal_of_more_devices_says_whether_sequence_parallelism_would_fit(devices, hint, capsys):
    words = ["plan", "--model", "llama3-70b", "--devices", str(devices), "--device", "h100", "--recipes", "bf16"]
    reason = printed_json(capsys, *words, code=1)["proposal"]["mesh_reason"]
    assert reason == f"the fewest devices that fit; no mesh of {devices} does{hint}"


@pytest.mark.usefixtures("_estimated_programs")
def test_shards_on_a_chosen_mesh_are_whole_blocks(capsys):
    words = ["plan", "--model", "gpt-tiny", "--devices", "16", "--device", "gb200", "--recipes"]
    assert printed_json(capsys, *words, "bf16")["mesh"] == {"dp": 1, "fsdp": 16, "tp": 1}
    assert printed_json(capsys, *words, "fp8_block")["mesh"] == {"dp": 2, "fsdp": 8, "tp": 1}


@pytest.mark.usefixtures("_estimated_programs")
def test_bf16_need_not_fit_unless_it_is_among_the_recipes(capsys):
    words = ["plan", "--model", "llama3-70b", "--mesh", "fsdp=4,tp=4", "--sequence", "7168", "--recipes"]
    assert printed_json(capsys, *words, "fp8_current")["fits"]
    assert not printed_json(capsys, *words, "bf16", code=1)["fits"]


@pytest.mark.usefixtures("_estimated_programs")
@pytest.mark.parametrize(
    ("more", "options"),
    [
        ([], "`--sequence-parallel` or a smaller `--batch`"),
        (["--sequence-parallel"], "a smaller `--batch` or `--sequence`"),
    ],
)
def test_if_no_mesh_fits_the_text_says_what_would_help(more, options, capsys):
    words = ["plan", "--model", "llama3-8b", "--devices", "4", "--batch", "640", "--recipes", "nvfp4", *more]
    assert printed_json(capsys, *words, code=1)["proposal"] is None
    text = printed(capsys, *words, code=1)
    assert f"no mesh fits 640 × 8192 tokens per tp group; {options} would reduce the residuals" in text


def test_a_model_file_that_is_not_json_is_named(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("{layers: 2}")
    code, line = error_of(capsys, "plan", "--model", str(path), "--devices", "8")
    assert code == 2
    assert f"`model` file {str(path)!r} is not JSON: Expecting property name" in line


# tune


def test_tune_has_the_kinds_and_defaults_of_the_autotuner():
    assert list(tune.KINDS) == list(autotune.KINDS)
    assert cli._parser(tune).parse_args(["tune"]).groups == autotune.GROUPS


def test_tune_fails_without_a_gpu(capsys):
    code, line = error_of(capsys, "tune")
    assert code == 1
    assert "cannot tune matmuls here: needs" in line


def test_tune_prints_what_it_measured(capsys, monkeypatch, tmp_path):
    path, measured = tmp_path / "table.json", [{"shape": {"m": 256}, "config": {"columns": 128}, "gain": 0.02}]

    def measure(shapes, path, report):
        report("[1/1] measured")
        return measured

    monkeypatch.setattr(autotune, "tune", measure)
    words = ["tune", "--kind", "integers", "--output", str(path)]
    assert printed_json(capsys, *words) == {"path": str(path), "measured": measured}
    assert main(words) == 0
    found = capsys.readouterr()
    assert (found.out, found.err) == (f"wrote {path}\n", "[1/1] measured\n")
