"""`format` as an assertion: ECMA patterns of the formats that a regular language holds exactly.

Sources: RFC 3339 (dates; from the year 0001, leap years exact, a leap second :60 in any minute), RFC 3339 appendix A
(duration), RFC 5321/5322 dot-atom (email), RFC 1123 (hostname), RFC 3986 (uri), RFC 4291 (ipv6), RFC 6901
(json-pointer), RFC 4122 (uuid). Any other format is an annotation, as the standard has it, and is reported.
"""

from __future__ import annotations

from sglite.grammar.schema.regex_format import REGEX

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"

# RFC 3339 has a year 0000; most programs, Python's among them, have not.
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
# Years divisible by 4, and by 400 where they are by 100.
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTH_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"(?:{_YEAR}-{_MONTH_DAY}|{_LEAP}-02-29)"
_OFFSET = r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?{_OFFSET}"

_DUR_TIME = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DUR_DATE = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = rf"P(?:{_DUR_DATE}(?:{_DUR_TIME})?|{_DUR_TIME}|[0-9]+W)"

_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@(?:{_HOSTNAME}|\[{_IPV4}\])"

_H16 = r"[0-9a-fA-F]{1,4}"
_LS32 = rf"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = "|".join(
    [rf"(?:{_H16}:){{6}}{_LS32}", rf"::(?:{_H16}:){{5}}{_LS32}"]
    + [rf"(?:(?:{_H16}:){{0,{n}}}{_H16})?::(?:{_H16}:){{{4 - n}}}{_LS32}" for n in range(5)]
    + [rf"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}", rf"(?:(?:{_H16}:){{0,6}}{_H16})?::"]
)
_IPV6 = f"(?:{_IPV6})"

_PCT = r"%[0-9a-fA-F]{2}"
_REG = r"a-zA-Z0-9._~!$&'()*+,;=\-"
_PCHAR = rf"(?:[{_REG}:@]|{_PCT})"
_SEGMENTS = rf"(?:/{_PCHAR}*)*"
_HOST = rf"(?:\[(?:{_IPV6}|v[0-9a-fA-F]+\.[{_REG}:]+)\]|(?:[{_REG}]|{_PCT})*)"
_AUTHORITY = rf"(?:(?:[{_REG}:]|{_PCT})*@)?{_HOST}(?::[0-9]*)?"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_HIER = rf"(?://{_AUTHORITY}{_SEGMENTS}|/(?:{_PCHAR}+{_SEGMENTS})?|{_PCHAR}+{_SEGMENTS}|)"
_URI = rf"[a-zA-Z][a-zA-Z0-9+.-]*:{_HIER}{_TAIL}"
_NO_COLON = rf"(?:(?:[{_REG}@]|{_PCT})+{_SEGMENTS})"
_RELATIVE = rf"(?://{_AUTHORITY}{_SEGMENTS}|/(?:{_PCHAR}+{_SEGMENTS})?|{_NO_COLON}|){_TAIL}"

_UCS = r"\u{A0}-\u{D7FF}\u{F900}-\u{FDCF}\u{FDF0}-\u{FFEF}\u{10000}-\u{EFFFD}"
_IRI = _URI.replace(_REG, _REG + _UCS)
_IRI_RELATIVE = _RELATIVE.replace(_REG, _REG + _UCS)

_VARNAME = rf"(?:\w|{_PCT})(?:\.?(?:\w|{_PCT}))*"
_VARSPEC = rf"{_VARNAME}(?::[1-9][0-9]{{0,3}}|\*)?"
_LITERAL = rf"(?:[!#$&(-;=?-\[\]_a-z~{_UCS}]|{_PCT})"
_URI_TEMPLATE = rf"(?:{_LITERAL}|\{{[+#./;?&=,!@|]?{_VARSPEC}(?:,{_VARSPEC})*\}})*"

_POINTER = r"(?:/(?:[^~/]|~[01])*)*"

_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[tT]{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uri-reference": rf"(?:{_URI}|{_RELATIVE})",
    "iri": _IRI,
    "iri-reference": rf"(?:{_IRI}|{_IRI_RELATIVE})",
    "uri-template": _URI_TEMPLATE,
    "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}

FORMAT_PATTERNS = {name: f"^(?:{body})$" for name, body in _FORMATS.items()}

# Assertions of the standard that no regular language holds.
IRREGULAR_FORMATS = frozenset({"regex", "idn-email", "idn-hostname"})

# Of some of these, what a regular language does hold: all of it is right, not all that is right is in it.
NARROWED_FORMATS = {"regex": f"^(?:{REGEX})$"}


def grammar_pattern(name: str) -> str:
    """What a grammar has for a format that it asserts."""
    return FORMAT_PATTERNS.get(name) or NARROWED_FORMATS[name]
