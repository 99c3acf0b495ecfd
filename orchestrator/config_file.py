"""The YAML file of ``--config``: one mapping of option names to values, read as the text that stands in it.

Values stay text so that an option is read alike from a flag, a variable and a file, and none of YAML 1.1's surprises
(``010`` is 8, ``1:30`` is 90, ``off`` is false) reaches it. The nodes are looked at as they are: no object is ever built.
"""

from dataclasses import dataclass

import yaml

from stages.errors import ConfigError

_NULL_TAG = "tag:yaml.org,2002:null"
MAX_FILE_BYTES = 1 << 20  # a config has some dozen lines; what is larger is another file given by mistake


@dataclass(frozen=True)
class FileValue:
    """What a key is set to. ``text`` is None for YAML's null, and has commas between the items of a list."""

    text: str | None
    is_list: bool
    source: str  # "FILE:LINE"


def read_config_file(path: str, named_by: str) -> dict[str, FileValue]:
    """The file's keys; ``ConfigError`` when it is no such mapping, or has a key twice.

    ``named_by`` is the flag or variable that gave ``path``.
    """
    try:
        with open(path, "rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{named_by} {path}: cannot be read: {exc.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{named_by} {path}: must have at most {MAX_FILE_BYTES} bytes")
    try:
        root = yaml.SafeLoader(data).get_single_node()
    except yaml.MarkedYAMLError as exc:
        line = f":{exc.problem_mark.line + 1}" if exc.problem_mark else ""
        raise ConfigError(f"{path}{line}: is not valid YAML: {exc.problem or exc.context}") from None
    except (yaml.YAMLError, UnicodeError, RecursionError) as exc:
        raise ConfigError(f"{path}: is not valid YAML: {str(exc).splitlines()[0]}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:{_line(root)}: must be a mapping of options, as `port: 8000`")
    values: dict[str, FileValue] = {}
    for key_node, value_node in root.value:
        source = f"{path}:{_line(key_node)}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{source}: an option's name must be plain text")
        key: str = key_node.value
        if key in values:
            raise ConfigError(f"{source}: {key}: must be given once, is also in {values[key].source}")
        values[key] = _value(key, value_node, source)
    return values


def _value(key: str, node: yaml.Node, source: str) -> FileValue:
    if isinstance(node, yaml.ScalarNode):
        return FileValue(None if node.tag == _NULL_TAG else node.value, False, source)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return FileValue(",".join(item.value for item in node.value), True, source)
    raise ConfigError(f"{source}: {key}: must be a single value or a list of single values")


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1
