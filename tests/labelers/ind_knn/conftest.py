import pytest


@pytest.fixture(params=["digests", "digests of the data module", "numbers"])
def kind(request):
    return request.param
