"""The S3 server, the proxy and the Hub as fixtures."""

from tests.runtime.fixtures import _hub, _server, hub, proxy, store  # noqa: F401 (fixtures)
