"""Templates that would hang a host or fill its memory, and templates that raise what Python can."""

from __future__ import annotations

GIGA = 3_000_000_000
LOOPS = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
BIG = "{% set big = 'ab ' * 30000000 %}"
# Two values, each of which holds itself twice, sixty times over.
TWICE = (
    "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
)
PAIRS = TWICE.replace("[1]", "(1,)").replace("[n.a, n.a]", "(n.a, n.a)").replace("[n.b, n.b]", "0")
HUGE = "{% set a = ('f' * 900000)|int(base=16) %}{% set b = ('f' * 450000)|int(base=16) %}"

# Each takes hours or gigabytes on its way to a text.
HOSTILE = {
    "nested loops": LOOPS,
    "nested loops that write": LOOPS.replace("{% endfor %}", "x{% endfor %}", 1),
    "a loop in a macro": f"{{% macro m() %}}{LOOPS}{{% endmacro %}}{{{{ m() }}}}",
    "a loop over what is said": "{% for a in range(99999) %}{% for c in messages[0].content %}"
    "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "a loop with a filter": "{% for a in range(99999) if a < 0 %}{% endfor %}" * 5000,
    "power": "{{ 9**(9**8) > 1 }}",
    "power that is written": "{{ 9**(9**7) }}",
    "power by a filter": "{{ (9**(9**8))|int }}",
    "powers": "{{ 2**(2**31) % 7 }}",
    "a product of powers": "{% set a = 7**30000000 %}{{ (a * a * a * a) % 11 }}",
    "repeated text": f"{{{{ 'a' * {GIGA} }}}}",
    "repeated list": f"{{{{ ([1] * {GIGA})|length }}}}",
    "repeated many times": "{{ 'a' * 99999999 }}" * 99,
    "center": f"{{{{ 'a'.center({GIGA}) }}}}",
    "the filter center": f"{{{{ 'a'|center({GIGA}) }}}}",
    "ljust": f"{{{{ 'a'.ljust({GIGA}) }}}}",
    "rjust": f"{{{{ 'a'.rjust({GIGA}) }}}}",
    "zfill": f"{{{{ '1'.zfill({GIGA}) }}}}",
    "a format of old": f"{{{{ '%0{GIGA}d'|format(1) }}}}",
    "percent": f"{{{{ '%{GIGA}d' % 1 }}}}",
    "a precision": "{{ '%.999999999f' % 1.0 }}",
    "a format": f"{{{{ '{{:>{GIGA}}}'.format(1) }}}}",
    "a format in a format": f"{{{{ '{{:>{{}}}}'.format(1, {GIGA}) }}}}",
    "expandtabs": "{{ '\\t'.expandtabs(2000000000) }}",
    "indent": f"{{{{ 'a\\nb'|indent({GIGA}) }}}}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "the filter replace": "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
    "join": "{{ ('a' * 99999).join('b' * 99999) }}",
    "slice": "{{ range(9)|slice(999999999)|list|length }}",
    "batch": "{{ range(9)|batch(999999999, 1)|list|length }}",
    "wordwrap": BIG + "{{ big|wordwrap(1) }}",
    "urlize": BIG + "{{ big|urlize|length }}",
    "title": BIG + "{{ big|title|length }}",
    "xmlattr": "{{ dict.fromkeys(range(99999), 'a' * 99999)|xmlattr|length }}" * 99,
    "tojson": "{{ ([['a' * 99999] * 999] * 99)|tojson|length }}",
    "sort": "{{ (range(99999)|list * 150)|sort|length }}" * 99,
    "sum of lists": "{{ ([[1] * 999] * 99999)|sum(start=[])|length }}",
    "doubling": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}"
    "{% endfor %}{{ n.s }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}"
    "{% endif %}{% endmacro %}{{ f(60) }}",
    "a loop that calls itself": "{% for a in [1, 1] recursive %}{% if loop.depth0 < 40 %}"
    "{{ loop([1, 1]) }}{% endif %}{% endfor %}",
    "only for long chats": f"{{% if messages|length > 20 %}}{LOOPS}{{% endif %}}",
    "only for tools": f"{{% if messages[2].role == 'tool' %}}{LOOPS}{{% endif %}}",
    "only where it is asked": f"{{% if add_generation_prompt %}}{LOOPS}{{% endif %}}",
}

# Those without an operator, a method or a filter that is large by itself: they answer signals.
LOOPING = {
    *("nested loops", "nested loops that write", "a loop in a macro", "a loop over what is said"),
    *("a loop with a filter", "a macro that calls itself twice", "a loop that calls itself"),
    *("only for long chats", "only for tools", "only where it is asked"),
}

# Others that hold up Python, and signals, for hours, or take gigabytes.
LARGE = {name: source for name, source in HOSTILE.items() if name not in LOOPING} | {
    "power of what is said": "{% set a = (messages|length) - (messages|length) + 9 %}"
    "{{ a**(a**a) % 2 }}",
    "a negative power": "{{ 9**-(9**8) }}",
    "squares": "{% set n = namespace(a=9) %}{% for i in range(40) %}{% set n.a = n.a * n.a %}"
    "{% endfor %}{{ n.a % 7 }}",
    "an integer of text": "{{ (('f' * 9999999)|int(base=16)) // 3 }}",
    "repeated tuple": f"{{{{ ((1, 2) * {GIGA})|length }}}}",
    "repeated bytes": f"{{{{ ('a'.encode() * {GIGA})|length }}}}",
    "repeated from the left": f"{{{{ {GIGA} * 'a' }}}}",
    "doubled by ~": "{% set n = namespace(s='a') %}{% for i in range(60) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s|length }}",
    "doubled by a block": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s %}"
    "{{ n.s }}{{ n.s }}{% endset %}{% endfor %}{{ n.s|length }}",
    "lists of lists": "{% set n = namespace(s=[]) %}{% for i in range(60) %}"
    "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "lists of lists that are compared": "{% set n = namespace(s=[], t=[]) %}"
    "{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% set n.t = [n.t, n.t] %}{% endfor %}"
    "{{ n.s == n.t }}",
    "lists of lists as text": "{% set n = namespace(s=[]) %}{% for i in range(60) %}"
    "{% set n.s = [n.s, n.s] %}{% endfor %}{{ (n.s|string)|length + (n.s|tojson)|length }}",
    "percent with a star": f"{{{{ '%*d' % ({GIGA}, 1) }}}}",
    "percent with names": "{{ ('%(a)s' * 99999) % dict(a='b' * 99999) }}",
    "percent of bytes": f"{{{{ 'a%{GIGA}d'.encode() % 1 }}}}",
    "the filter format with names": f"{{{{ '%(a){GIGA}d'|format(a=1) }}}}",
    "a format many times": "{{ ('{0}' * 99999).format('b' * 99999) }}",
    "format_map": f"{{{{ '{{a:>{GIGA}}}'.format_map(dict(a=1)) }}}}",
    "format of safe text": f"{{{{ ('{{:>{GIGA}}}'|safe).format(1) }}}}",
    "center of safe text": f"{{{{ ('a'|safe).center({GIGA}) }}}}",
    "a method by the filter attr": f"{{{{ ('a'|attr('center'))({GIGA}) }}}}",
    "a method by name": f"{{{{ 'a'['ljust'](width={GIGA}) if 0 else 'a'['ljust']({GIGA}) }}}}",
    "a filter by map": f"{{{{ ['a']|map('center', {GIGA})|join }}}}",
    "indent by a name": f"{{{{ 'a\nb'|indent(first=true, width={GIGA}) }}}}",
    "indent by a text": "{{ ('a\n' * 99999)|indent('b' * 99999) }}",
    "tojson with an indent": f"{{{{ messages|tojson(indent={GIGA}) }}}}",
    "tojson with separators": "{{ [[1] * 99999]|tojson(separators=(',' * 99999, ':')) }}",
    "a power of ten": "{{ 5|round(-999999999) }}",
    "the number of bytes": f"{{{{ 5 .to_bytes({GIGA}, 'big')|length }}}}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999})|length }}",
    "the filter join": "{{ ('a' * 99999)|join('b' * 99999) }}",
    **{
        f"values that hold themselves twice, by {name}": f"{TWICE}{{{{ {source} }}}}"
        for name, source in {
            "a test": "n.a is eq(n.b)",
            "a test without arguments": "n.a is lower",
            "the test in": "n.a is in([n.b])",
            "the test of a filter": "[n.a]|select('eq', n.b)|list|length",
            "a filter of a test": "[n.a]|select(n.b)|list",
            "a chain": "0 != n.a == n.b",
            "a chain with in": "n.a in [n.b] == true",
            "count": "[n.a].count(n.b)",
            "index": "[n.a].index(n.b)",
            "dictsort": "{1: n.a, 2: n.b}|dictsort(by='value')|length",
            "a conversion": "'{!r}'.format(n.a)|length",
            "another conversion": "'{!s}'.format(n.a)|length",
            "a conversion of format_map": "'{a!r}'.format_map({'a': n.a})|length",
            "a conversion of safe text": "('{!s}'|safe).format(n.a)|length",
            "a conversion of an attribute": "'{0.a!r}'.format(n)|length",
            "an error": "raise_exception(n.a)",
            "an error of a key": "messages[n.a].x",
            "safe": "(n.a|safe)|length",
            "a namespace": "n",
            "a namespace in a list": "[n]|string|length",
            "views": "{1: n.a}.values() ~ {1: n.a}.items()",
        }.items()
    },
    "values that hold themselves twice, by changed": TWICE
    + "{% for x in [n.a, n.b] %}{{ loop.changed(x) }}{% endfor %}",
    "values that hold themselves twice, by the loop": TWICE
    + "{% for x in [n.a, 1] %}{{ '{0.previtem!r}'.format(loop) }}{% endfor %}",
    "values that hold themselves twice, by a macro": "{% set n = namespace(a=1) %}"
    "{% macro f() %}{% set n.a = varargs %}{% endmacro %}"
    "{% for i in range(60) %}{{ f(n.a, n.a) }}{% endfor %}{{ n.a }}",
    "values that hold themselves twice, by filters": "{% set n = namespace(a=1) %}"
    "{% for i in range(60) %}{% set n.a = [0, 0]|map('default', n.a, true)|list %}"
    "{% endfor %}{{ n.a }}",
    "values that hold themselves twice, by fromkeys": "{% set n = namespace(a=1) %}"
    "{% for i in range(60) %}{% set n.a = dict.fromkeys([1, 2], n.a) %}{% endfor %}{{ n.a }}",
    **{
        f"hashes of pairs of themselves, by {name}": f"{PAIRS}{{{{ {source} }}}}"
        for name, source in {
            "a dictionary": "{n.a: 1}|length",
            "a key": "{}[n.a]",
            "get": "{}.get(n.a)",
            "in": "n.a in {}",
            "the test filter": "n.a is filter",
            "unique": "[n.a]|unique|list|length",
            "fromkeys": "dict.fromkeys([n.a])|length",
            "dict": "dict([[n.a, 1]]|map('list'))|length",
        }.items()
    },
    "divisibleby": HUGE + "{{ a is divisibleby(b) }}",
    "odd": f"{{{{ '%{GIGA}d' is odd }}}}",
    "even": f"{{{{ ['%{GIGA}d']|select('even')|list }}}}",
    "replace by names": "{{ ('a' * 99999)|replace(new='b' * 99999, old='a')|length }}",
    "replace with a count": "{{ ('a' * 99999).replace('a', 'b' * 99999, *[-1])|length }}",
    "indent by a name alone": "{{ ('a\n' * 99999)|indent(width='b' * 99999) }}",
    "expandtabs by a name": "{{ '\t'.expandtabs(tabsize=2000000000) }}",
    "batch by a name": "{{ range(9)|batch(fill_with=1, linecount=999999999)|list|length }}",
    "join by a name": "{{ ('a' * 99999)|join(d='b' * 99999) }}",
    "join by a list": "{{ ('a' * 99999)|join(d=['b' * 99999]) }}",
    "urlize with a target": "{{ ('http://a.b ' * 99999)|urlize(target=['b' * 99999])|length }}",
    "tojson of what is deep": "{% set n = namespace(s=[1] * 99999) %}{% for i in range(200) %}"
    "{% set n.s = [n.s] %}{% endfor %}{{ n.s|tojson(indent=9)|length }}",
    "pprint of what is deep": "{% set n = namespace(s=[1] * 99999) %}{% for i in range(200) %}"
    "{% set n.s = [n.s] %}{% endfor %}{{ n.s|pprint|length }}",
    "the filter join of names": "{{ ([messages[0]] * 999999)|join('b' * 9, attribute='content') }}",
}

# Each ends at once with an error of its own.
FAILING = {
    "a lone cycler": "{{ cycler() }}",
    "deep brackets": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "deep lists": "{{ " + "[" * 5_000 + "]" * 5_000 + " }}",
    "deep conditions": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "deep loops": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "a macro without an end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "an endless range": "{{ range(9999999999)|list }}",
    "an infinite number": "{{ 1e999|int }}",
    "too large for a float": "{{ 10**400 / 1.5 }}",
    "too many digits": "{{ 10**9999 }}",
    "a character without a code": "{{ '%c' % -1 }}",
    "nothing left": "{{ [].pop() }}",
    "not a number": "{{ 'a'|int('b') + none }}",
    "an index": "{{ messages[99].content.x }}",
    "an unknown filter": "{{ 'a'|no_such_filter }}",
    "a file": "{% include '/etc/passwd' %}",
    "another template": "{% extends 'x' %}",
    "an internal name": "{{ ''.__class__.__mro__ }}",
    "an internal name by a namespace": "{{ namespace(__class__=1) }}",
    "chance": "{{ [1, 2]|random }}",
    "text by chance": "{{ lipsum(n=99999) }}",
    "a text without an end": "{% for a in range(99999) %}" + "x" * 999 + "{% endfor %}",
}
