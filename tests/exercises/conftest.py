"""Hands each chapter's file its own exercises and answers."""
import pytest

pytest.register_assert_rewrite("exercises.checking")

from .checking import solutions  # noqa: E402


def pytest_generate_tests(metafunc):
    asked, module = set(metafunc.fixturenames), metafunc.module
    if "right" in asked:
        answers = [*solutions(_chapter(module)).items(), *getattr(module, "RIGHT", [])]
        names = [f"{id}-{getattr(answer, '__name__', 'solution')}" for id, answer in answers]
        metafunc.parametrize("id, right", answers, ids=names)
    elif "wrong" in asked:
        metafunc.parametrize("id, wrong, named", [
            (id, *pair) for id, pairs in module.WRONG.items() for pair in pairs])
    elif "id" in asked:
        metafunc.parametrize("id", list(solutions(_chapter(module))))


def _chapter(module):
    return module.__name__.rpartition("test_")[2]


@pytest.fixture
def chapter(request):
    return _chapter(request.module)


@pytest.fixture
def wrong_answers(request):
    return request.module.WRONG
