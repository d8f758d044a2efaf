"""Fonts of pictures: each text in one that has its characters, such as Chinese ones. Imported with matplotlib only."""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Any

logger = logging.getLogger(__name__)


def choose_fonts(figure: Any) -> None:
    """Set fonts behind matplotlib's own for what it lacks in the texts of *figure*; log characters no font has."""
    from matplotlib.text import Text

    texts = figure.findobj(Text)
    characters = {char for text in texts for char in text.get_text() if char.isprintable() and not char.isspace()}
    missing = frozenset(map(ord, characters)) - _characters(_default_file())
    if not missing:
        return
    names, missing = _substitutes(missing)
    for text in texts:
        text.set_fontfamily([*text.get_fontfamily(), *names])
    if missing:
        sample = " ".join(map(chr, sorted(missing)[:8]))
        logger.warning(
            "pictures: no installed font has %s%s, boxes are drawn; install a font of that script, such as Noto",
            sample, " …" if len(missing) > 8 else "",
        )  # fmt: skip
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # said once, above


def _default_file() -> str:
    from matplotlib import font_manager

    return str(font_manager.findfont(font_manager.FontProperties()))


def _substitutes(missing: frozenset[int]) -> tuple[list[str], frozenset[int]]:
    """Families of installed fonts that have *missing* characters, each the one with most of them; and what is left."""
    from matplotlib import font_manager

    # The upright fonts of normal weight; sans serif ones first, as matplotlib's own. A last-resort font draws boxes.
    fonts = [
        font for font in font_manager.fontManager.ttflist if font.style == "normal" and font.weight in (400, "normal")
    ]
    fonts = [font for font in fonts if not font.name.startswith("Last Resort")]
    fonts.sort(key=lambda font: ("Sans" not in font.name, font.name))
    names: list[str] = []
    while missing and fonts:
        best = max(fonts, key=lambda font: len(missing & _characters(font.fname)))
        if not missing & _characters(best.fname):
            break
        # Greedily the font with most of what is missing: few fonts in one picture.
        names.append(best.name)
        missing -= _characters(best.fname)
    return names, missing


@functools.cache
def _characters(file: str) -> frozenset[int]:
    """Code points of the characters in a font's *file*; none if it cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(file).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()
