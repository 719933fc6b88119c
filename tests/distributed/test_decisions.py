"""What ranks decide together, over gloo: every rank gets the same answer, or the same error."""

from __future__ import annotations

import json
from pathlib import Path

from tools.forking import Nursery


def test_every_rank_gets_the_answer_or_the_error_of_the_rank_that_has_it(
    nursery: Nursery, tmp_path: Path
):
    statuses, _, report = nursery.run(
        "tests.distributed.decisions", [str(tmp_path)], tmp_path / "said", processes=3
    )
    assert statuses == [0, 0, 0], report
    for rank in range(3):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.pop("own") == 10 * rank
        assert found == {
            "from_rank_0": [0, "told"],
            "decide": [[0, 0], [1, 100_000], [2, 200_000]],
            "then": 30,
            "one fails": [
                "StorageError",
                "/theirs: No space left on device; correct the path or its permissions",
                2,
            ],
            "then fails": ["StorageError", "the manifest cannot be written", 0],
            "on_rank_0": ["of", 0],
            "on_rank_0 fails": [
                "StorageError",
                "/ours: No space left on device; correct the path or its permissions",
                0,
            ],
            "gather": [0, 1, 2],
        }
