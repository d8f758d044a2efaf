"""apex's Adam, which :mod:`fairseq.optim.adam` chooses by itself."""


def get_fused_adam_class() -> None:
    """Return None, at which a plug-in takes its own Adam."""
