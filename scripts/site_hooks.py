"""What mkdocs calls beside its own work: a short flag is never broken behind its dashes."""

from __future__ import annotations

import re
from typing import Any

FLAG = re.compile(r"<code>(--[^<\n]{1,40})</code>")


def on_page_content(html: str, **_: Any) -> str:
    """The page with a class on such flags, which stylesheets/wide.css knows."""
    return FLAG.sub(r'<code class="flag">\1</code>', html)
