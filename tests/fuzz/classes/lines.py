"""Valid command lines, to which one bad flag or file is added."""

from __future__ import annotations

from pathlib import Path

from fuzz.inputs import LM, TINY

TRAIN = [*LM, *TINY, "--no-save", "--disable-validation"]


def lines(base: Path) -> dict[str, list[str]]:
    """A valid command line of each command, with outputs in the current folder."""
    data, lm, tnf = f"{base}/data", f"{base}/lm/checkpoint_last.pt", f"{base}/tnf/checkpoint_last.pt"
    model = [data, "--path", lm, "--cpu"]
    tables = ["--data-bin", data, "--seeds", "1", "--lrs", "0.001", "--max-epoch", "1", "--cpu"]
    texts = ["--only-source", "--trainpref", f"{base}/train.txt"]
    return {
        "train": [data, *TRAIN],
        "eval_lm": [*model, "--gen-subset", "valid"],
        "validate": model,
        "interactive": [*model, "--input", f"{base}/prompts.txt", "--max-new-tokens", "2"],
        "generate": [*model, "--gen-subset", "valid", "--context-tokens", "4", "--max-new-tokens", "2"],
        "recl": [*model, "--gen-subset", "valid", "--step", "2", "--max-context", "4", "--positions", "4"],
        "attention": [*model, "--gen-subset", "valid", "--first-tokens", "40", "--results-path", "out"],
        "preprocess": [*texts, "--destdir", "out", "--tokenizer", "space"],
        "tokenize": [f"{base}/train.txt", "--tokenizer", "space"],
        "symbols": [f"{base}/train.txt", "out", "--kind", "bytes"],
        "plot": [f"{base}/metrics.jsonl", "--split", "train_inner"],
        "notes": [tnf, data],
        "export_model": [lm, "--to", "hf", "--out", "out", "--data", data],
        "import_model": [f"{base}/hf", "--from", "hf", "--out", "out"],
        "average_checkpoints": ["--inputs", lm, "--output", "out.pt"],
        "merge_checkpoint": [f"{base}/sharded", "out.pt"],
        "finetune": [f"{base}/tables", "--path", tnf, "--save-dir", "out", *tables],
        "classify": [f"{base}/classifier/checkpoint_last.pt", f"{base}/prompts.txt", "--cpu"],
        "harness": [lm, "--data", data, "--tasks", "standin", "--cpu"],
        "lm_eval": ["--model", "fairseq", "--model_args", f"path={lm},data={data},device=cpu", "--tasks", "standin"],
        "demo_corpus": ["out", "--max-words", "200"],
        "demo": ["--output", "out", "--max-words", "200"],
    }
