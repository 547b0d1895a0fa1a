"""Derived values: the grammar, and that nothing else gets through."""

import random

import pytest

from rigsweep.sweeps.expressions import ExpressionError, evaluate, is_expression, keys_in

VALUES = {"model.layers": 4, "model.width": 96, "batch": 0.5, "flag": True, "name": "x", "nothing": None}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("= 32 * model.layers", 128),
        ("=1+2*3", 7),
        ("= (1 + 2) * 3", 9),
        ("= 2 ** 3 ** 2", 512),
        ("= -2 ** 2", -4),
        ("= 7 // 2 + 7 % 2", 4),
        ("= 10 / 4", 2.5),
        ("= 10 - 4 - 3", 3),
        ("= --3", 3),
        ("= max(1, min(model.width, 64), 8)", 64),
        ("= 1e-3 * (256 / model.width) ** batch", 1e-3 * (256 / 96) ** 0.5),
        ("= 2 ** -1", 0.5),
    ],
)
def test_expressions_compute_as_arithmetic_does(text: str, value: float) -> None:
    assert evaluate(text, VALUES) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("=", "an expression of 1 to 200 characters"),
        (f"= {'1+' * 100}1", "an expression of 1 to 200 characters"),
        ("= 1 +", "cannot be read"),
        ("= 400k", "cannot be read"),
        ("= " + "(" * 150, "cannot be read"),
        ("= model.depth", "model.depth is not a key with a value"),
        ("= flag + 1", "flag is not a number, found True"),
        ("= name", "name is not a number"),
        ("= nothing", "nothing is not a number"),
        ("= 1 / (model.layers - 4)", "cannot be computed: division by zero"),
        ("= 1 % 0", "cannot be computed"),
        ("= 0 ** -1", "cannot be computed"),
        ("= (0 - 8) ** 0.5", "is not a real number"),
        ("= 9 ** 9 ** 9", "a power of 387420489 is more than is allowed"),
        ("= ((9 ** 64) ** 64) ** 64", "a value is over 1e"),
        ("= 1e999", "a value is over 1e"),
        ("= 1e30 * 10 - 1e30 * 10", "a value is over 1e"),
        ("= min(1)", "min takes two or more values"),
        ("= max()", "max takes two or more values"),
        ("= min(*model.width)", "min takes two or more values"),
        ("= min(1, 2, key=abs)", "min takes two or more values"),
    ],
)
def test_what_cannot_be_computed_says_why(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message.replace("(", r"\(")):
        evaluate(text, VALUES)


@pytest.mark.parametrize(
    "text",
    [
        "= __import__('os').system('true')",
        "= open('x')",
        "= abs(1)",
        "= (lambda: 1)()",
        "= [1][0]",
        "= {1: 2}",
        "= 'text'",
        "= 'a' * 100000000",
        "= f'{1}'",
        "= True + 1",
        "= None",
        "= ...",
        "= 1j",
        "= 1 if 2 else 3",
        "= 1 < 2",
        "= 1 and 2",
        "= not 1",
        "= ~1",
        "= 1 << 99",
        "= 1 | 2",
        "= 2 @ 2",
        "= (x := 1)",
        "= model.layers[0]",
        "= (1).real",
        "= min.x(1, 2)",
        "= [x for x in y]",
        "= await x",
        "= max(*(1, 2), 3)",
    ],
)
def test_nothing_but_arithmetic_gets_through(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text, VALUES)
    with pytest.raises(ExpressionError):
        keys_in(text)


def test_reading_the_keys_needs_no_values() -> None:
    # With every key the same this would be a division by zero, and the last key not be seen.
    assert keys_in("= 1 / (model.layers - model.width) + batch") == {"model.layers", "model.width", "batch"}
    assert keys_in("= 3") == set()


def test_only_a_text_with_an_equals_sign_in_front_is_an_expression() -> None:
    assert is_expression("= 1")
    assert is_expression("=1")
    assert not is_expression("1 = 1")
    assert not is_expression(1)


def test_whatever_is_written_either_is_a_number_or_says_why_it_is_not() -> None:
    draw = random.Random(0)
    pieces = [
        *(
            "1",
            "0",
            "2.5",
            "1e300",
            "64",
            "model.layers",
            "model.width",
            "flag",
            "x",
            "x.y",
            "min",
            "max",
            "lambda",
            "if",
        ),
        *(
            "+",
            "-",
            "*",
            "/",
            "//",
            "%",
            "**",
            "(",
            ")",
            ",",
            ".",
            " ",
            "'",
            "[",
            "]",
            ":",
            "\n",
            "\x00",
            "é",
            "_",
            "~",
        ),
    ]
    numbers = 0
    for _ in range(5000):
        text = "= " + "".join(draw.choice(pieces) for _ in range(draw.randint(1, 12)))
        try:
            assert abs(evaluate(text, VALUES)) <= 1e30
            assert keys_in(text) <= VALUES.keys()
            numbers += 1
        except ExpressionError as error:
            assert "\n" not in str(error) or "\n" in text
    assert numbers > 50


def test_random_arithmetic_agrees_with_python() -> None:
    draw = random.Random(1)

    def write(depth: int) -> str:
        if depth == 0:
            return draw.choice(["1", "2", "3.5", "7", "a", "b.c"])
        left, right = write(depth - 1), write(depth - 1)
        form = draw.choice(["{} + {}", "({} - {})", "{} * {}", "({} / {})", "({} // {})", "{} % {}", "min({}, {})"])
        return form.format(left, right)

    agreed = 0
    for _ in range(500):
        text = write(draw.randint(1, 3))
        plain = text.replace("b.c", "5").replace("a", "4")
        try:
            expected = eval(plain)
        except ZeroDivisionError:
            continue
        assert evaluate(f"= {text}", {"a": 4, "b.c": 5}) == expected
        agreed += 1
    assert agreed > 400
