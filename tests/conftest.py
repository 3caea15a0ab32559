def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="more rounds where tests repeat something at random")
