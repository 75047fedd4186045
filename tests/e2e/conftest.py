from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.serving import serving


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """Where the bundled model is served as it comes."""
    with serving(None) as served:
        yield served.url
        assert served.stop(timeout_s=300) == 0, "a drained server ends with status 0"
