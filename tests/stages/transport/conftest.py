from tests.stages.transport.harness import no_leaks  # noqa: F401  every test here checks for leaks
