"""What all tests share."""

pytest_plugins = ["tests.support.broker", "tests.support.command_line", "tests.support.go_tools"]
