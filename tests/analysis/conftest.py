from tests.evaluation.conftest import quickstart  # noqa: F401 (a fixture)
