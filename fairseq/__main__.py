"""``python -m fairseq``: the commands, one line each, in the order in which they are used."""

from fairseq.system.version import NAME, __version__

COMMANDS = {
    "fairseq-corpus": "make a corpus: text in three splits",
    "fairseq-preprocess": "text to a dictionary and binary corpora",
    "fairseq-tokenize": "text to symbols, or symbols to text",
    "fairseq-train": "train a model, on one process or several",
    "fairseq-hydra-train": "the same, with Hydra's command lines and YAML files",
    "fairseq-validate": "the validation loss of checkpoints, as in training",
    "fairseq-eval-lm": "perplexity, and the probability of each word",
    "fairseq-generate": "continue passages of a corpus",
    "fairseq-interactive": "continue prompts",
    "fairseq-harness": "minimal pairs, and tasks of lm-evaluation-harness",
    "fairseq-finetune": "fine-tune an encoder or a decoder, and classify text",
    "fairseq-compare": "train settings with several seeds, and test differences",
    "fairseq-analyze": "what a model does with context, heads and notes; curves",
    "fairseq-checkpoint": "average checkpoints, or merge a sharded one",
    "fairseq-import": "a foreign model to a checkpoint and a dictionary",
    "fairseq-export": "a model to a folder of transformers, or to fairseq",
}

if __name__ == "__main__":
    print(f"{NAME} {__version__}. COMMAND --help shows the flags of a command.\n")
    for command, purpose in COMMANDS.items():
        print(f"{command:21}{purpose}")
