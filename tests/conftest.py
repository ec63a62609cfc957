"""What all tests share."""

pytest_plugins = ["tests.support.broker"]
