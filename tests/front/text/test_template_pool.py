import threading

import pytest

from headrace.base.errors import InvalidRequest, Unavailable
from headrace.front.text.template_pool import TemplateLimits, TemplatePool
from tests.stopwatch import Stopwatch

LIMITS = TemplateLimits(seconds=1.0, max_chars=10_000, memory_bytes=512 << 20)


@pytest.fixture(scope="module")
def pool():
    made = TemplatePool(LIMITS, size=2)
    assert made.render("warm", {}) == "warm"
    yield made
    made.close()


@pytest.fixture(scope="module")
def patient_pool():
    """What is refused by something else than its time is not, because the machine is busy."""
    pool = TemplatePool(
        TemplateLimits(seconds=60.0, max_chars=10_000, memory_bytes=512 << 20), size=1
    )
    yield pool
    pool.close()


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BOMBS = {
    "endless loop": (ENDLESS, "longer than 1 s"),
    "huge range": ("{% for a in range(10**12) %}{% endfor %}", "[Rr]ange"),
    "repetition": ("{{ 'a' * 10**10 }}", "repetition"),
    "repetition from the left": ("{{ 10**10 * 'a' }}", "repetition"),
    "power": ("{{ 10 ** (10 ** 10) }}", "exponent"),
    "memory": ("{% set ns = namespace(s='a' * 999999) %}{% for i in range(40) %}"
               "{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "memory"),
    "output": ("{% for a in range(20000) %}x{% endfor %}", "more than 10000 characters"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses|Recursion"),
    "raise_exception": ("{{ raise_exception('no ' ~ 'tools') }}", "no tools"),
    "syntax": ("{% for %}", "TemplateSyntaxError"),
    "attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError|undefined"),
    "mutation": ("{{ messages.append(1) }}", "SecurityError"),
    "include": ("{% include '/etc/passwd' %}", "loader"),
}  # fmt: skip


@pytest.mark.serial
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_within_the_limit_and_harm_nobody(pool, patient_pool, name):
    """P11, T11."""
    source, message = BOMBS[name]
    watch = Stopwatch()
    with pytest.raises(InvalidRequest, match=message) as caught:
        (pool if name == "endless loop" else patient_pool).render(source, {"messages": []})
    assert watch.undisturbed_s < 2 * LIMITS.seconds
    assert caught.value.field == "messages"
    assert pool.render("{{ x }} again", {"x": "well"}) == "well again"


def test_another_render_goes_on_beside_an_endless_one(pool):
    failed = []

    def endless():
        try:
            pool.render(ENDLESS, {})
        except InvalidRequest as error:
            failed.append(error)

    thread = threading.Thread(target=endless)
    thread.start()
    assert [pool.render("{{ i }}", {"i": i}) for i in range(20)] == [str(i) for i in range(20)]
    thread.join()
    assert len(failed) == 1


def test_no_free_process_is_an_overload():
    pool = TemplatePool(TemplateLimits(seconds=0.05), size=0)
    with pytest.raises(Unavailable) as caught:
        pool.render("x", {})
    assert caught.value.retry_after_s


def test_a_killed_process_is_replaced():
    pool = TemplatePool(LIMITS, size=1)
    try:
        assert pool.render("a", {}) == "a"
        worker = pool._slots.queue[0]
        worker._child._process.kill()
        worker._child._process.wait()
        assert pool.render("b", {}) == "b"
    finally:
        pool.close()


def test_large_texts_pass_through_the_pipes():
    pool = TemplatePool(TemplateLimits(), size=1)
    try:
        text = "é" * 1_000_000
        assert pool.render("{{ text }}", {"text": text}) == text
    finally:
        pool.close()


def test_names_are_the_variables_a_template_reads(pool):
    assert pool.names("{{ a }}{% set b = 1 %}{{ b }}{% for c in d %}{{ c }}{% endfor %}") == [
        "a",
        "d",
    ]


def test_an_empty_template_is_empty_also_under_a_number_given_anew():
    """It was looked for under its number: a failure, or another request's template once numbers are given anew."""
    pool = TemplatePool(LIMITS, size=1)
    for i in range(32):
        assert pool.render(f"secret {i}", {}) == f"secret {i}"
    assert pool.render("", {}) == ""
    assert pool.render("", {}) == ""
    pool.close()
