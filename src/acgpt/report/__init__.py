"""Reports: what came of several runs, compared as the paper compares, in tables and figures with its own beside them.

    run folders ──► runs ──► finetuning (a part) ──► tables, pictures ──► write

A part answers one question of the paper; `write.PARTS` lists them.
"""
