"""The S3 server and the proxy as fixtures."""

from tests.runtime.fixtures import _server, proxy, store  # noqa: F401 (fixtures)
