"""Writes the generated pages of docs/ anew: python -m tests.docs.regenerate."""

from __future__ import annotations

from tests.docs import cli_reference, launches, patches_reference, recipe_reference, versions_reference
from tests.docs.markdown import REPOSITORY

PAGES = {
    "docs/recipe.md": recipe_reference.page,
    "docs/cli.md": cli_reference.page,
    "docs/patches.md": patches_reference.page,
    "docs/kimi-launches.md": launches.kimi_page,
    "docs/launches.md": launches.page,
    "docs/versions.md": versions_reference.page,
}


def main() -> None:
    """Writes all of them."""
    for name, page in PAGES.items():
        (REPOSITORY / name).write_text(page())


if __name__ == "__main__":
    main()
