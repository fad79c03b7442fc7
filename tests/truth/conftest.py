"""These tests run where the producers' packages are: tools/test makes the environment and says so."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("compressed_tensors") and find_spec("auto_round") else ["test_*.py"]
