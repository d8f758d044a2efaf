"""The adapter for the evaluation harness: the numbers of scoring token by token, of eval-lm, and of
a local task."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mistakes import user_error
from runs import DATA, arguments, model_of

from fairseq import checkpoint
from fairseq.config import options
from fairseq.errors import UserError
from fairseq.hub import LanguageModel
from fairseq.inference import Search, stream
from fairseq.interop.harness import harness_model
from fairseq.interop.harness.requests import Requests
from fairseq.models.loading import stored_parameters
from fairseq.text.dictionary import Dictionary
from fairseq_cli import eval_lm, harness
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.harness import get_harness_parser

SMALL = "--decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 48 --decoder-attention-heads 4"
SMALL += " --criterion adaptive_loss --max-tokens 64 --cpu --tokens-per-sample 8"
ARCHS = {
    "baseline": f"--arch transformer_lm_tiny {SMALL}",
    "shortformer": f"--arch shortformer_tiny {SMALL}",
    "transformer_xl": "--arch transformer_xl --n-layer 2 --d-model 32 --d-inner 48 --n-head 4 --cutoffs 100,400 "
    "--div-val 2 --mem-len 6 --max-tokens 64 --cpu --tokens-per-sample 8",
}


def saved(flags: str, folder: Path) -> Path:
    """A checkpoint of a random model and its dictionary."""
    model = model_of(flags).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    folder.mkdir(exist_ok=True)
    shutil.copy(DATA / "dict.txt", folder)
    args = {key: value for key, value in vars(arguments(flags)).items() if key != "data"}
    state = {"args": args, "model": stored_parameters(model), "optimizer_history": [], "extra_state": {}}
    checkpoint.save(folder / "checkpoint.pt", state)
    return folder / "checkpoint.pt"


@pytest.fixture(scope="module", params=ARCHS)
def requests(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Requests:
    path = saved(ARCHS[request.param], tmp_path_factory.mktemp(request.param))
    return Requests(LanguageModel.from_pretrained(path), batch_size=3, max_tokens=5)


def words(model: LanguageModel, *ids: int) -> str:
    return " ".join(model.dictionary[index] for index in ids)


def naive(model: Any, ids: list[int], first: int, segment: int) -> tuple[float, bool]:
    """The log-probability of ids[first:], each token from as many before it as the model may
    read."""
    total, greedy = 0.0, True
    for place in range(first, len(ids)):
        if model.memory_length:
            memory, start = None, 0
            while place - start > segment:
                memory = model(torch.tensor([ids[start : start + segment]]), memory=memory)[1]["memory"]
                start += segment
            hidden = model(torch.tensor([ids[start:place]]), memory=memory)[0][0, -1]
        else:  # windows are counted from the end
            last = len(ids) - 1
            start = max(0, last - segment * ((last - place) // segment + 1))
            hidden = model(torch.tensor([ids[start:place]]))[0][0, -1]
        lprobs = model.output_layer.log_probs(hidden[None])[0]
        total += float(lprobs[ids[place]])
        greedy &= int(lprobs.argmax()) == ids[place]
    return total, greedy


def generated(requests: Requests, context: str, **settings: Any) -> str:
    return requests.generations([(context, settings)])[0]


LONG = list(range(5, 24))  # more than two segments
PAIRS = [([5, 6], [7]), ([], [9, 10]), (LONG, [8, 9]), ([4], LONG), (LONG, LONG), ([7], [])]  # ids


@torch.no_grad()
def test_log_likelihoods_are_those_of_the_tokens_one_by_one(requests: Requests) -> None:
    model = requests.model
    pairs = [(words(model, *before), " " * bool(before and after) + words(model, *after)) for before, after in PAIRS]
    found = requests.log_likelihoods([*pairs, (words(model, 5) + "\n", words(model, 6))])
    # A context of several segments by itself: the first segment has no token to score.
    assert requests.log_likelihoods(pairs[2:3]) == [(pytest.approx(found[2][0], abs=1e-4), found[2][1])]
    for (before, after), (lprob, greedy) in zip([*PAIRS, ([5], [2, 6])], found, strict=True):
        start = before or [2]  # only what has no context follows `</s>`
        want, best = naive(model.model, [*start, *after], len(start), requests.segment)
        assert lprob == pytest.approx(want, abs=1e-5 * (1 + len(after))) and greedy is best


@torch.no_grad()
def test_texts_without_a_start_are_scored_from_their_second_token_on(requests: Requests) -> None:
    model, rows = requests.model, [[5, 6, 7], [8], LONG, []]
    found = requests.rolling([words(model, *ids) for ids in rows], starts=False)
    want = [naive(model.model, ids, 1, requests.segment)[0] for ids in rows]
    assert found == pytest.approx(want, abs=1e-4) and want[1] == want[3] == 0


@pytest.mark.parametrize("encoding", ["absolute", "learned"])
@pytest.mark.parametrize("has_padding", [True, False])  # the authors' vocabularies have no symbol for it
def test_answers_do_not_depend_on_the_batch_where_positions_count_from_the_end(
    has_padding: bool, encoding: str, tmp_path: Path
) -> None:
    flags = f"{ARCHS['transformer_xl']} --mem-len 0 --position-encoding {encoding}"
    path = saved(flags, tmp_path)
    if not has_padding:
        known = Dictionary.load(tmp_path / "dict.txt")
        symbols = [known[index] if index > 3 else f"<{index}>" for index in range(len(known))]
        Dictionary.of_listed(symbols, {"eos": "<2>", "unk": "<3>"}).save(tmp_path / "dict.txt")
    model = LanguageModel.from_pretrained(path)
    assert (model.dictionary.pad() >= 0) is has_padding
    texts = [words(model, *LONG[:length]) for length in (3, 7, 5)]
    together, alone = (Requests(model, batch_size=size).rolling(texts) for size in (3, 1))
    assert together == pytest.approx(alone, abs=1e-4)
    scored, single = (model.score(texts, batch_size=size) for size in (3, 1))
    assert [float(s.sum()) for _, s in scored] == pytest.approx([float(s.sum()) for _, s in single], abs=1e-4)


def test_the_most_probable_continuation_is_greedy(requests: Requests) -> None:
    model = requests.model
    chosen = list(stream([model.model], [5, 6], Search(4, temperature=0), forbidden=model.never_sampled))
    [(_, greedy)] = requests.log_likelihoods([(words(model, 5, 6), " " + words(model, *chosen))])
    assert greedy or 2 in chosen


def test_generation_stops_before_the_first_stop_string(requests: Requests) -> None:
    model = requests.model
    whole = generated(requests, words(model, 5, 6), until=[], max_gen_toks=12)
    ids = list(stream([model.model], [5, 6], Search(12, temperature=0), forbidden=model.never_sampled))
    assert model.text([5, 6, *ids]) == words(model, 5, 6) + whole
    stop = model.dictionary[next(index for index in ids[1:] if index != 2)]
    cut = generated(requests, words(model, 5, 6), until=[stop, "Question:"], max_gen_toks=12, temperature=0.0)
    assert cut == whole[: whole.index(stop)] and stop not in cut
    assert len(generated(requests, "", until="nowhere").split()) <= 5
    with pytest.raises(UserError, match="num_beams: not implemented; known: do_sample"):
        generated(requests, "", num_beams=4)


def test_unknown_words_are_reported_as_a_share(requests: Requests, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    Requests(requests.model)
    requests.rolling([words(requests.model, 5, 6, 7) + " nowhere"])
    assert "vocabulary is closed" in caplog.text and "25 % of 4 tokens are read as <unk>" in caplog.text


def test_a_text_scores_as_in_eval_lm(requests: Requests, tmp_path: Path, request: Any) -> None:
    lines = [words(requests.model, *range(start, start + 7)) for start in (5, 30, 60)]
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n")
    path = saved(ARCHS[request.node.callspec.params["requests"]], tmp_path / "model")
    argv = [str(path.parent), "--path", str(path), "--text", str(tmp_path / "text.txt"), "--batch-size", "1", "--cpu"]
    report = eval_lm.main(options.parse_args_and_arch(get_eval_lm_parser(), argv))
    [total] = Requests(LanguageModel.from_pretrained(path)).rolling(["\n".join(lines) + "\n"])
    assert -total / math.log(2) / report["tokens"] == pytest.approx(report["loss_base2"], abs=1e-6)


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
{more}
metadata: {{version: 1}}
"""
PERPLEXITY = """doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]"""
CHOICE = """doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]"""
UNTIL = """doc_to_text: "{{context}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 3}
metric_list: [{metric: exact_match}]"""
KINDS = {
    "rolling": ("loglikelihood_rolling", PERPLEXITY),
    "choice": ("multiple_choice", CHOICE),
    "until": ("generate_until", UNTIL),
}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    yield


def test_tasks_of_the_harness_agree_with_our_scores_from_its_own_command_line(
    offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="the [eval] extra is not installed")
    path = saved(ARCHS["shortformer"], tmp_path / "model")
    model = LanguageModel.from_pretrained(path)
    texts = [words(model, *range(start, start + 9)) for start in (5, 40, 80)]
    rows = []
    for text in texts:
        context = " ".join(text.split()[:5])
        answer = generated(Requests(model), context, max_gen_toks=3)
        choices = [f" {texts[0]}", answer]
        rows.append({"text": text, "context": context, "choices": choices, "label": 1, "answer": answer})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, (kind, more) in KINDS.items():
        task = TASK.format(name=name, data=tmp_path / "data.jsonl", kind=kind, more=more)
        (tmp_path / f"{name}.yaml").write_text(task)
    tasks = ",".join(str(tmp_path / f"{name}.yaml") for name in KINDS)
    flags = f"--model fairseq --model_args path={path} --tasks {tasks} --device cpu"
    argv = ["fairseq-harness", "lm-eval", "run", *flags.split(), "--output_path", str(tmp_path / "results")]
    monkeypatch.setattr("sys.argv", argv)
    harness.cli_main()
    [results] = [json.loads(file.read_text()) for file in (tmp_path / "results").rglob("results*.json")]
    found = results["results"]
    total = sum(float(Requests(model).rolling([text])[0]) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    assert found["rolling"]["bits_per_byte,none"] == pytest.approx(-total / math.log(2) / size, rel=1e-6)
    assert found["choice"]["acc,none"] == 1.0 and found["until"]["exact_match,none"] == 1.0


def test_mistakes_in_the_harness_command_line_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval", reason="the [eval] extra is not installed")
    for given, message in [
        ("path=model.pt,beam=4", "--model_args: beam: unknown; the arguments are path, data, "),
        ("data=x", "--model_args: path=CHECKPOINT is missing"),
        ("path=nowhere.pt", "nowhere.pt: "),
    ]:
        monkeypatch.setattr("lm_eval.__main__.cli_evaluate", partial(harness_model().create_from_arg_string, given))
        monkeypatch.setattr("sys.argv", ["fairseq-harness", "lm-eval"])
        with pytest.raises(SystemExit) as stop:
            harness.cli_main()
        assert stop.value.code == 2 and f"fairseq-harness lm-eval: error: {message}" in capsys.readouterr().err


def test_the_harness_finds_the_model_by_its_entry_point() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    entry = '[project.entry-points."lm_eval.models"]\nfairseq = "fairseq.interop.harness.model:FairseqLM"\n'
    assert entry in project
    pytest.importorskip("lm_eval", reason="the [eval] extra is not installed")
    assert (harness_model().__module__, harness_model().__name__) == ("fairseq.interop.harness.model", "FairseqLM")


def test_a_missing_harness_or_missing_pairs_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with user_error("--pairs: give minimal pairs"):
        harness.main(get_harness_parser().parse_args(["missing.pt"]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs lm-eval, which is not installed; pip install lm-eval"):
        harness_model()
