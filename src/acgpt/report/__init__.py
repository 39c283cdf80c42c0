"""Reports: compare several runs as the paper does, in tables and figures with the paper's own numbers.

    run folders ──► runs ──► entries ──► from_scratch, finetuning ──► tables, pictures ──► page, write
    generations ──► scores ────────────► generation             ──►

An entry is what one row is about: it knows its perplexities and what it may be compared with. A part answers one
question of the paper; `write.PARTS` lists them. `compare.compare` is the public function. Measurements are tidy pandas
tables, and pages are jinja2 templates. Both packages belong to the extra `report`; no other package of acgpt imports
them.
"""
