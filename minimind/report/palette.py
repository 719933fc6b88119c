"""Colors of the pages."""

from __future__ import annotations

# Light and dark, after Okabe and Ito (2008), whose colors differ for every kind of color vision.
PALETTE = {
    **{"paper": ("#ffffff", "#14181d"), "ink": ("#1d2733", "#e4e8ec")},
    **{"soft": ("#5c6773", "#97a3af"), "rule": ("#dfe3e8", "#2c343d")},
    **{"bad": ("#c0392b", "#ff7b6b"), "good": ("#00795a", "#2fc99b")},
    **{"run0": ("#0072b2", "#56b4e9"), "run1": ("#d55e00", "#f08b43")},
    **{"run2": ("#009e73", "#2fc99b"), "run3": ("#b0578d", "#d98cba")},
    **{"run4": ("#b8860b", "#e6b422"), "run5": ("#3a9bd9", "#9ad0f5")},
    **{"run6": ("#6b5b95", "#b3a1e0"), "run7": ("#555555", "#b5b5b5")},
    **{"data": ("#e69f00", "#e6b422"), "forward": ("#7cc4ec", "#2f6a96")},
    **{"backward": ("#2f7fb8", "#62b5ea"), "optimizer": ("#1fa27c", "#1fa27c")},
    **{"evaluate": ("#cc79a7", "#cc79a7"), "checkpoint": ("#7b4fa0", "#b08fd4")},
    **{"sample": ("#999999", "#999999"), "trace": ("#cccccc", "#cccccc"), "gc": ("#8c6d46",) * 2},
    "verify": ("#5b8c5a", "#5b8c5a"),
}
LIGHT = {name: light for name, (light, _) in PALETTE.items()}  # page.html changes light to dark
