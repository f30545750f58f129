"""A script's first lines that make a machine without MLX, or without what extras bring, of this one."""


def without(*packages: str) -> str:
    """Make the lines after which these packages and what is below them can't be imported."""
    return f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{package!r}}", name=package)

sys.meta_path.insert(0, Blocked())
"""


WITHOUT_MLX = without("mlx")
