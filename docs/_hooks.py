"""Pages that live at the root of the repository, and the plots that they show, as pages of the site."""

from pathlib import Path

from mkdocs.structure.files import File, Files

PAGES = ("BENCHMARKS.md", "DESIGN.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")


def on_files(files: Files, config) -> Files:
    root = Path(config["config_file_path"]).parent
    for path in [*(root / name for name in PAGES), *(root / "benchmarks" / "plots").glob("*.png")]:
        name = path.relative_to(root).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files
