"""Reports: compare several runs as the paper does, in tables and figures with the paper's own numbers.

    run folders ──► runs ──► from_scratch, finetuning, generation (parts) ──► tables, pictures ──► page, write

A part answers one question of the paper; `write.PARTS` lists them. `compare.compare` is the public function.
Measurements are tidy pandas tables, and pages are jinja2 templates. Both packages belong to the extra `report`; no
other package of acgpt imports them.
"""
