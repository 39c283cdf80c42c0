"""The record of bad input to the Python API: the class and the message of each error.

A case is an expression; `<tmp>` is the folder that the fixture `room` fills. Messages are recorded for acgpt's own
errors alone, because those of Python and of libraries depend on their versions.
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import cut, index, keys, last_is_nan, tensors, text, without
from record import check
from room import Room
from servers import tiny_lm

import acgpt
from acgpt import Query
from acgpt.data.corpus import Corpus
from acgpt.evaluation.dataset import EvaluationDataset
from acgpt.experiments.experiment import load_experiment
from acgpt.experiments.runner import run_experiment
from acgpt.query.conditioning import Conditioning, generator
from acgpt.training.recipe import load_recipe
from acgpt.training.train import train

TEMPLATES = [
    "lm.log_prob('The cat sat.')",
    "lm.log_prob('The {{cat sat.')",
    "lm.log_prob('The {{cat {{sat}}}}.')",
    "lm.log_prob('The {{}} sat.')",
    "lm.log_prob('The {{_4}} sat.')",
    "lm.log_prob('The {{a|b}} sat.')",
    "lm.log_prob('The cat that sat on the mat and then on the log and on the dog and on the bird sat {{_')",
    "lm.log_prob('The {{cat}}\\nsat {{on')",
    "lm.log_prob('a\\ud800 {{cat}}')",
    "lm.log_prob('The {{cat}}' * 60)",
    "lm.log_prob(3)",
    "lm.log_prob(['The {{cat}} sat.', None])",
    "acgpt.Client().log_prob(3)",
    "lm.log_prob(b'The {{cat}} sat.')",
    "lm.log_prob('The {{cat}} sat.', future='yes')",
    "lm.log_prob('The {{cat}} sat.', adapter='mine')",
    "lm.sample('The {{_0}} sat.')",
    "lm.sample('The {{_999999999999}} sat.')",
    "lm.sample('The {{_99999}} sat.')",
    "lm.sample('The {{_3-}} sat.')",
    "lm.sample('The {{?}} {{_1}} sat.')",
    "lm.sample('The {{?0}} {{_1}} sat.')",
    "lm.fill('The {{cat}} sat.')",
    "lm.fill('The {{_5-3}} sat.')",
    "lm.fill('The {{_:[}} sat.')",
    "lm.fill('The {{_:^a$}} sat.')",
    "lm.fill('The {{_:a{900}}} sat.')",
    "lm.fill('The {{_:' + 'a' * 5000 + '}} sat.')",
    "lm.fill('The {{_20-30}} sat.', max_tokens=5)",
    "lm.fill(7)",
    "lm.rank('The cat sat.')",
    "lm.rank('The {{_}} sat.')",
    "lm.rank('The {{cat|cat}} sat.')",
    "lm.rank('{{cat|}}')",
    "lm.rank('{{a|b|c|d|e|f|g|h}}' * 5)",
    "lm.rank(3)",
    "lm.lengths('The {{_}} sat.')",
    "predicting.lengths('The {{_}} sat.', 3)",
    "predicting.lengths('The {{_}} sat.', [3, 4])",
    "predicting.lengths('The {{_}} sat {{_}}.', [-1])",
    "predicting.lengths('The {{_}}')",
    "lm.query('The {{_}} sat.')",
    "lm.rank('a {{b}}')",
    "lm.rank('{{a|b}} {{_2}}')",
    "lm.rank('{{a|b}} {{?2}}')",
]
QUERIES = [
    "Query([5, 6], [True])",
    "Query([5, 6], [True, True])",
    "Query([5, 6], [True, False], [True, True])",
    "Query([None, 6], [True, False])",
    "Query([-5, 6], [True, False])",
    "Query([5.5, 6], [True, False])",
    "Query([True, 6], [True, False])",
    "Query([], [])",
    "lm.log_prob(Query([5, None], [True, False]))",
    "lm.log_prob(Query([5, 900], [True, False]))",
    "lm.log_prob(Query([5] * 200, [True] * 199 + [False]))",
    "maskless.sample(Query([5, None, 6], [True, False, False], [False, False, True]))",
]
SAMPLING = [
    "lm.sample('The {{_1}} sat.', temperature=-1)",
    "lm.sample('The {{_1}} sat.', temperature=math.nan)",
    "lm.sample('The {{_1}} sat.', temperature=math.inf)",
    "lm.sample('The {{_1}} sat.', temperature=True)",
    "lm.sample('The {{_1}} sat.', temperature='0.5')",
    "lm.sample('The {{_1}} sat.', top_p=0)",
    "lm.sample('The {{_1}} sat.', top_p=1.5)",
    "lm.sample('The {{_1}} sat.', top_p=None)",
    "lm.sample('The {{_1}} sat.', top_k=0)",
    "lm.sample('The {{_1}} sat.', top_k=2.0)",
    "lm.sample('The {{_1}} sat.', seed=1.5)",
    "lm.sample('The {{_1}} sat.', n=0)",
    "lm.sample('The {{_1}} sat.', n=True)",
    "lm.sample('The {{_1}} sat.', beam=3)",
    "lm.sample('The {{_}} sat.', candidates=0)",
    "lm.fill('The {{_}} sat.', n=-1)",
    "lm.fill('The {{_}} sat.', max_tokens=0)",
    "lm.fill('The {{_}} sat.', patience=0)",
    "lm.fill('The {{_}} sat.', best_of=0)",
    "lm.fill('The {{_}} sat.', stop='')",
    "lm.fill('The {{_}} sat.', stop=[3])",
    "lm.compile()",
]
MODELS = [
    "acgpt.LanguageModel(lm.model, 'tokenizer')",
    "acgpt.LanguageModel('model', lm.tokenizer)",
    "acgpt.LanguageModel(lm.model, lm.tokenizer, attention='flash')",
    "acgpt.LanguageModel(lm.model, lm.tokenizer, attention='varlen')",
    "acgpt.LanguageModel(lm.model, lm.tokenizer, bos='<start>')",
    "acgpt.LanguageModel(lm.model, lm.tokenizer, bos=5000)",
    "acgpt.LanguageModel(lm.model, lm.tokenizer, mask=1.5)",
    "acgpt.LanguageModel(lm.model, lm.tokenizer, length_head={'mine': None})",
    "acgpt.LanguageModel(lm.model, lm.tokenizer, metadata={'mine': acgpt.Metadata()})",
    "acgpt.LanguageModel(lm.model, lm.tokenizer, metadata=acgpt.Metadata(tokenizer_hash='another'))",
    "acgpt.load('<tmp>/nowhere')",
    "acgpt.load('')",
    "acgpt.load(3)",
    "acgpt.load('<tmp>/notes.txt')",
    "acgpt.load('<tmp>/nothing.gguf')",
    "acgpt.load('<tmp>/empty')",
    "acgpt.load('<tmp>/unfinished')",
    "acgpt.load('<tmp>/model', adapter='<tmp>/model')",
    "acgpt.load('<tmp>/model', adapter='<tmp>/notes.txt')",
    "acgpt.load('<tmp>/model', adapter={})",
    "acgpt.load('<tmp>/model', adapter={'none': '<tmp>/adapter'})",
    "acgpt.load('<tmp>/model', adapter={'a b': '<tmp>/adapter'})",
    "acgpt.load('<tmp>/model', adapter={'keys': '<tmp>/adapter'})",
    "acgpt.load('<tmp>/model', device='tpu')",
    "acgpt.load('<tmp>/model', dtype='int8')",
    "acgpt.load('<tmp>/model', dtyp='float32')",
    "acgpt.load(damaged(without('config.json')))",
    "acgpt.load(damaged(text('config.json', '[]')))",
    "acgpt.load(damaged(keys(hidden_size=-32)))",
    "acgpt.load(damaged(keys(num_local_experts=10**9)))",
    "acgpt.load(damaged(keys(num_hidden_layers=3)))",
    "acgpt.load(damaged(keys(vocab_size=10**12)))",
    "acgpt.load(damaged(index({})))",
    "acgpt.load(damaged(index({'weight_map': {'a': 'gone.safetensors'}})))",
    "acgpt.load(damaged(index({'weight_map': {'a': '/x.safetensors'}})))",
    "acgpt.load(damaged(tensors(last_is_nan)))",
    "acgpt.load(damaged(text('acgpt.json', '[]')))",
    "acgpt.load(damaged(keys('acgpt.json', format_version=99)))",
    "acgpt.load(damaged(keys('acgpt.json', method=5)))",
    "acgpt.load(damaged(keys('acgpt.json', method='ac-gtp')))",
    "acgpt.load(damaged(keys('acgpt.json', bos_token_id=10**12)))",
    "acgpt.load(damaged(keys('acgpt.json', lengths={'file': 'length_head.safetensors', 'distance': 5})))",
    "acgpt.load(damaged(keys('acgpt.json', lengths={'file': '../x', 'distance': 5})))",
    "acgpt.load(damaged(keys('acgpt.json', lengths={'file': 'length_head.safetensors', 'distance': 0})))",
    "acgpt.merge('<tmp>/model', '<tmp>/adapter', '<tmp>/corpus')",
    "acgpt.merge('<tmp>/model', '<tmp>/nowhere', '<tmp>/merged')",
    "acgpt.push('<tmp>/model', 'model', dry_run=True)",
    "acgpt.push('<tmp>/empty', 'owner/model', dry_run=True)",
    "acgpt.push('<tmp>/adapter', 'owner/model', dry_run=True)",
    "acgpt.push('<tmp>/nowhere', 'owner/model', dry_run=True)",
]
CONDITIONING = [
    "Conditioning.from_dict(3)",
    "Conditioning.from_dict({'r_mx': 0.5})",
    "Conditioning.from_dict({'r_max': 1.5})",
    "Conditioning.from_dict({'r_max': True})",
    "Conditioning.from_dict({'r_min': 0.6, 'r_max': 0.5})",
    "Conditioning.from_dict({'b_min': 0})",
    "Conditioning.from_dict({'b_min': 5, 'b_max': 4})",
    "Conditioning.from_dict({'b_max': 2.5})",
    "Conditioning.from_dict({'placement': 'anywhere'})",
    "Conditioning.from_dict({'unknown': 1})",
    "Conditioning.from_dict({'infilling': 0.7, 'empty': 0.7})",
    "Conditioning.from_dict({'parts': {}})",
    "Conditioning.from_dict({'parts': []})",
    "Conditioning.from_dict({'parts': [{'kind': 'block'}]})",
    "Conditioning.from_dict({'parts': [{'weight': 0}]})",
    "Conditioning.from_dict({'parts': [{'kind': 'gaps', 'passages': 0}]})",
    "Conditioning.from_dict({'parts': [{'kind': 'gaps', 'lengths': 2}]})",
    "Conditioning.from_dict({'parts': [{'kind': 'gaps', 'length_weight': 0}]})",
    "Conditioning.from_dict({'parts': [{'kind': 'empty', 'r_max': 0.5}]})",
    "Conditioning.from_dict({}).roles(0, np.random.default_rng(0))",
    "Conditioning.from_dict({'zzz': 1})",
    "Conditioning.from_dict({'placement': []})",
    "Conditioning.from_dict({'r_min': -0.1})",
    "Conditioning.from_dict({'r_max': '0.6'})",
    "Conditioning.from_dict({'r_max': math.nan})",
    "Conditioning.from_dict({'f_max': 1.5})",
    "Conditioning.from_dict({'b_max': True})",
    "Conditioning.from_dict({'b_max': 'length'})",
    "Conditioning.from_dict({'b_min': 'size', 'b_max': 2})",
    "Conditioning.from_dict({'empty': -0.1})",
    "Conditioning.from_dict({'empty': None})",
    "Conditioning.from_dict({'unknown': -0.1})",
    "Conditioning.from_dict({'unknown': '0.1'})",
    "Conditioning.from_dict({'parts': [{}], 'r_max': 0.5})",
    "Conditioning.from_dict({'parts': [1]})",
    "Conditioning.from_dict({'parts': [{}, {'r_max': 2}]})",
    "Conditioning.from_dict({'parts': [{'wieght': 2}]})",
    "Conditioning.from_dict({'parts': [{'weight': -1}]})",
    "Conditioning.from_dict({'parts': [{'weight': math.inf}]})",
    "Conditioning.from_dict({'parts': [{'weight': '1'}]})",
    "Conditioning.from_dict({'parts': [{'kind': ['blocks']}]})",
    "Conditioning.from_dict({'parts': [{'kind': 'infilling', 'b_max': 2}]})",
    "Conditioning.from_dict({'parts': [{'kind': 'gaps', 'length': 1}]})",
    "generator(-1, 0, 0)",
    "generator(2**32, 0, 0)",
    "generator(0, None, 0)",
    "generator(0, 0, 2**64)",
    "generator(1.0, 0, 0)",
    "generator(0, 0, '3')",
]
RECIPES = [
    "load_recipe('tiny-cup')",
    "load_recipe('corpus=data/mine')",
    "load_recipe('<tmp>/tiny-cpu.yaml')",
    "load_recipe(damaged(text('it.yaml', 'steps: 5\\nsteps: 6')) / 'it.yaml')",
    "load_recipe(damaged(text('it.yaml', 'conditioning: {r_max: 1, r_max: 0}')) / 'it.yaml')",
    "load_recipe(damaged(text('it.yaml', '')) / 'it.yaml')",
    "load_recipe(damaged(text('it.yaml', 'steps: [')) / 'it.yaml')",
    "load_recipe(damaged(text('it.yaml', 'steps: !!python/object/apply:os.getcwd []')) / 'it.yaml')",
    "load_recipe('<tmp>/list.yaml')",
    "load_recipe('<tmp>/typo.yaml')",
    "load_recipe('tiny-cpu', ['steps'])",
    "load_recipe('tiny-cpu', ['=3'])",
    "load_recipe('tiny-cpu', ['steps=[1'])",
    "load_recipe('tiny-cpu', ['stpes=3'])",
    "load_recipe('tiny-cpu', ['learning_rate=0.1'])",
    "load_recipe('tiny-cpu', ['steps=many'])",
    "load_recipe('tiny-cpu', ['steps=true'])",
    "load_recipe('tiny-cpu', ['lr=true'])",
    "load_recipe('tiny-cpu', ['compile=1'])",
    "load_recipe('tiny-cpu', {'corpus': 3})",
    "load_recipe('tiny-cpu', ['target_positions=sum'])",
    "load_recipe('tiny-cpu', ['steps=3', 'epochs=1'])",
    "load_recipe('tiny-cpu', ['steps=3', 'warmup=3'])",
    "load_recipe('tiny-cpu', ['lr=-1'])",
    "load_recipe('tiny-cpu', ['betas=[0.9]'])",
    "load_recipe('tiny-cpu', ['optimizer=adam'])",
    "load_recipe('tiny-cpu', ['method=ac-gtp'])",
    "load_recipe('tiny-cpu', ['optimizer=adamw', 'muon_lr=0.1'])",
    "load_recipe('tiny-cpu', ['schedule=constant', 'cooldown=0.5'])",
    "load_recipe('tiny-cpu', ['schedule=constant', 'final_lr=0.1'])",
    "load_recipe('tiny-cpu', ['target_positions=table'])",
    "load_recipe('tiny-cpu', ['parallel=fsdp', 'optimizer=muon'])",
    "load_recipe('tiny-cpu', ['parallel=fsdp', 'compile=true', 'optimizer=adamw', 'muon_lr=null'])",
    "load_recipe('tiny-cpu', ['precision=bf16', 'device=mps'])",
    "load_recipe('tiny-cpu', ['lora.rank=4'])",
    "load_recipe('tiny-cpu', ['checkpointing=true'])",
    "load_recipe('tiny-cpu', ['quantize=4bit', 'base=x'])",
    "load_recipe('tiny-cpu', ['base=x', 'dropout=0.1'])",
    "load_recipe('tiny-cpu', ['base=x', 'lora.rank=0'])",
    "load_recipe('tiny-cpu', ['base=x', 'lora.ranks=4'])",
    "load_recipe('tiny-cpu', ['base=x', 'lora.targets=q_proj'])",
    "load_recipe('tiny-cpu', ['model=huge'])",
    "load_recipe('tiny-cpu', ['model={layers: 2, width: 33, heads: 4}'])",
    "load_recipe('tiny-cpu', ['model={layers: 2, width: 12, heads: 4}'])",
    "load_recipe('tiny-cpu', ['model={layers: 0, width: 32, heads: 4}'])",
    "load_recipe('tiny-cpu', ['model={layers: 2.5}'])",
    "load_recipe('tiny-cpu', ['model={layers: 2, widht: 32, heads: 4}'])",
    "load_recipe('tiny-cpu', ['steps.more=3'])",
    "load_recipe('tiny-cpu', ['conditioning.r_max=2'])",
    "load_recipe('tiny-cpu', ['conditioning=0.6'])",
    "load_recipe('tiny-cpu', ['conditioning={r_max: 0.6}', 'conditioning.parts=[]'])",
    "load_recipe('tiny-cpu', ['seed=4294967296'])",
]
EXPERIMENTS = [
    "load_experiment('tiny-cup')",
    "load_experiment('<tmp>/grid-typo.yaml')",
    "load_experiment('<tmp>/grid-scalar.yaml')",
    "load_experiment('<tmp>/recipe.yaml')",
    "load_experiment(damaged(text('it.yaml', 'output: a\\noutput: b')) / 'it.yaml')",
    "load_experiment(damaged(text('it.yaml', 'recipe: tiny-cpu\\ngrid: {seed: [0]}')) / 'it.yaml')",
    "load_experiment(grid(recipe='tiny-cup'))",
    "load_experiment(grid(output=''))",
    "load_experiment(grid(grid={}))",
    "load_experiment(grid(grid=['seed']))",
    "load_experiment(grid(grid={'seed': []}))",
    "load_experiment(grid(grid={'output': ['a', 'b']}))",
    "load_experiment(grid(grid={'sede': [0]}))",
    "load_experiment(grid(grid={'conditioning.rmax': [0.5]}))",
    "load_experiment(grid(grid={'seed': ['one']}))",
    "load_experiment(grid(grid={'method': ['ac-gtp']}))",
    "load_experiment(grid(grid={'optimizer': ['adamw']}, set={'muon_lr': 1e-3}))",
    "load_experiment(grid(set={'output': 'a'}))",
    "load_experiment(grid(set={'conditioning.b_max': 3}, grid={'conditioning': [{'r_max': 1.0}]}))",
    "load_experiment(grid(set={'seed': 3}))",
    "load_experiment(grid(grid={'mask': ['a/b', 'a_b']}))",
    "load_experiment(grid(evaluate=[]))",
    "load_experiment(grid(evaluate={'splits': 'test'}))",
    "load_experiment(grid(evaluate={'split': ['test']}))",
    "load_experiment(grid(evaluate={'r_max': [2]}))",
    "load_experiment(grid(evaluate={'limit': 0}))",
    "load_experiment(grid(evaluate={'conditioning': {'bmax': 2}}))",
    "load_experiment(grid(evaluate={'dtype': 'bf16'}))",
    "load_experiment(grid(evaluate={'batch_tokens': 0}))",
    "load_experiment(grid(evaluate={'method_options': 3}))",
    "load_experiment(grid(evaluate={'method_options': {'gpt': 'order=random'}}))",
    "load_experiment(grid(evaluate={'method_options': {'gtp': ['order=random']}}))",
    "load_experiment(grid(evaluate={'method_options': {'gpt': ['order=random']}}))",
    "load_experiment(grid(evaluate={'method_options': {'sigma-gpt-random': ['order']}}))",
    "load_experiment(grid(generate=['test']))",
    "load_experiment(grid(generate={'mode': ['training']}))",
    "load_experiment(grid(generate={'modes': 'training'}))",
    "load_experiment(grid(generate={'splits': []}))",
    "load_experiment(grid(generate={'compile': 'maybe'}))",
    "load_experiment(grid(generate={'samples': 0}))",
    "load_experiment(grid(generate={'prompt': -1}))",
    "load_experiment(grid(generate={'prompt': 31}))",
    "load_experiment(grid(generate={}, grid={'length': [63, 20]}))",
    "load_experiment(grid(generate={'top_p': 0}))",
    "load_experiment(grid(generate={'temperature': 'hot'}))",
    "load_experiment(grid(generate={'seed': -1}))",
    "load_experiment(grid(generate={'modes': ['infill']}))",
    "load_experiment(grid(mauve={}))",
    "load_experiment(grid(generate={'limit': 3}, mauve={}))",
    "load_experiment(grid(generate={}, mauve=True))",
    "load_experiment(grid(generate={}, mauve={'splits': ['test']}))",
    "load_experiment(grid(generate={}, mauve={'split': ['test']}))",
    "load_experiment(grid(generate={}, mauve={'judge': ''}))",
    "load_experiment(grid(generate={}, mauve={'seeds': True}))",
    "load_experiment(grid(generate={}, mauve={'asked_only': 'yes'}))",
    "load_experiment(grid(generate={}, mauve={'count': 9}))",
    "load_experiment(grid(generate={}, mauve={'skip': -1}))",
    "load_experiment(grid(generate={}, mauve={'no_mauve': True, 'asked_only': True}))",
    "load_experiment(grid(generate={}, mauve={'rule': 'none'}))",
    "load_experiment(grid(generate={}, mauve={'no_mauve': True, 'seeds': 3}))",
    "load_experiment('<tmp>/grid.yaml', ['grid=3'])",
    "load_experiment('<tmp>/grid.yaml').chosen(['5'])",
    "run_experiment('<tmp>/grid.yaml', processes=0)",
    "run_experiment(load_experiment('<tmp>/grid.yaml'), ['steps=3'])",
    "run_experiment(grid(set={'corpus': '<tmp>/nowhere'}))",
    "run_experiment(grid(evaluate={'splits': ['test']}))",
]
TRAINING = [
    "train('<tmp>/recipe.yaml', corpus=None)",
    "train('<tmp>/recipe.yaml', corpus='')",
    "train('<tmp>/recipe.yaml', method='mlm', base='<tmp>/model', model='tiny')",
    "train('<tmp>/recipe.yaml', corpus='<tmp>/nowhere')",
    "train('<tmp>/recipe.yaml', corpus='<tmp>/notes.txt')",
    "train('<tmp>/recipe.yaml', output='<tmp>/notes.txt')",
    "train('<tmp>/recipe.yaml', output='<tmp>/corpus')",
    "train('<tmp>/recipe.yaml', output='')",
    "train('<tmp>/recipe.yaml', output='<tmp>/unfinished')",
    "train('<tmp>/recipe.yaml', output='<tmp>/notes.txt/run')",
    "train('<tmp>/recipe.yaml', output='/proc/no-such/run')",
    "train('<tmp>/recipe.yaml', eval_split='valdation')",
    "train('<tmp>/recipe.yaml', method='mlm', conditioning={'parts': [{'kind': 'gaps'}]})",
    "train('<tmp>/recipe.yaml', batch=10**6)",
    "train('<tmp>/recipe.yaml', minutes=-1)",
    "train('<tmp>/recipe.yaml', minutes=math.nan)",
    "train('<tmp>/recipe.yaml', precison='fp32')",
    "train('<tmp>/recipe.yaml', compile=True)",
    "acgpt.finetune('<tmp>/model', '<tmp>/corpus', '<tmp>/run', full=True, rank=3)",
    "acgpt.finetune('<tmp>/model', '<tmp>/corpus', '<tmp>/run', length=10**4)",
    "acgpt.finetune('<tmp>/model', '<tmp>/corpus', '<tmp>/run', length=31, mask='<nope>')",
    "acgpt.finetune('<tmp>/model', '<tmp>/corpus', '<tmp>/run', length=31, device='cpu', four_bits=True)",
    "acgpt.finetune('<tmp>/model', '<tmp>/corpus', '<tmp>/run', length=31, **{'lora.start': '<tmp>/empty'})",
    "acgpt.finetune('<tmp>/model', '<tmp>/corpus', '<tmp>/run', length=31, **{'lora.start': '<tmp>/adapter'})",
    "acgpt.finetune('<tmp>/model', '<tmp>/corpus', '<tmp>/run', length=31, rank=64, **{'lora.start': 'default'})",
    "acgpt.finetune('<tmp>/adapter', '<tmp>/corpus', '<tmp>/run')",
    "acgpt.finetune(None, '<tmp>/corpus', '<tmp>/run', recipe='tiny-cpu')",
]
MEASURING = [
    "acgpt.evaluate(lm, None)",
    "acgpt.evaluate(lm, '<tmp>/nowhere')",
    "acgpt.evaluate(lm, '<tmp>/corpus', split='test')",
    "acgpt.evaluate(lm, '<tmp>/corpus', r_max=1.5)",
    "acgpt.evaluate(lm, '<tmp>/corpus', limit=True)",
    "acgpt.evaluate(lm, '<tmp>/corpus', length=500)",
    "acgpt.evaluate(lm, '<tmp>/corpus', length=10**5)",
    "acgpt.evaluate(lm, '<tmp>/corpus', length=500, dataset='<tmp>/set.safetensors')",
    "acgpt.evaluate(lm, '<tmp>/other', length=31)",
    "acgpt.evaluate(lm, '<tmp>/corpus', length=31, modes=['infill'])",
    "acgpt.evaluate(lm, '<tmp>/corpus', length=31, method='ac-gtp')",
    "acgpt.evaluate(lm, '<tmp>/corpus', length=31, options={'draws': 3})",
    "acgpt.evaluate(lm, '<tmp>/corpus', length=31, conditioning={'r_mx': 1})",
    "acgpt.evaluate(lm, '<tmp>/corpus', length=31, conditioning='model')",
    "acgpt.evaluate(lm, '<tmp>/corpus', length=31, limit=2, output='<tmp>/empty')",
    "acgpt.evaluate(lm, '<tmp>/corpus', length=31, limit=2, compiled=True)",
    "acgpt.evaluate(lm, '<tmp>/corpus', length=31, limit=2, records='<tmp>/records.json')",
    "acgpt.evaluate(lm, dataset='<tmp>/nowhere.safetensors')",
    "acgpt.evaluate(lm, '<tmp>/corpus', device='cpu')",
    "acgpt.evaluate(lm, '<tmp>/corpus', adapter=False)",
    "acgpt.evaluate(lm, '<tmp>/corpus', dtype='float64')",
    "acgpt.evaluate(lm, '<tmp>/corpus', limits=3)",
    "acgpt.generate(lm, '<tmp>/corpus', '<tmp>/notes.txt', length=31)",
    "acgpt.generate(lm, '<tmp>/corpus', '<tmp>/samples', top_p=0)",
    "acgpt.generate(lm, '<tmp>/corpus', '<tmp>/samples', prompt=-1)",
    "acgpt.generate(lm, '<tmp>/corpus', '<tmp>/samples', length=31, prompt=31)",
    "acgpt.score_samples('<tmp>/nowhere', '<tmp>/corpus', no_mauve=True)",
    "acgpt.score_samples('<tmp>/empty', '<tmp>/corpus', no_mauve=True)",
    "acgpt.score_samples('<tmp>/notes.txt', '<tmp>/corpus', no_mauve=True)",
    "acgpt.score_samples('<tmp>/empty', '<tmp>/corpus', no_mauve=True, seeds=3)",
    "acgpt.score_samples('<tmp>/empty', '<tmp>/corpus', no_mauve=True, skip=0, asked_only=True)",
    "acgpt.score_samples('<tmp>/empty', '<tmp>/corpus', sedes=1)",
    "EvaluationDataset.build(np.arange(123), tokenizer_hash='t', length=0)",
    "EvaluationDataset.build(np.arange(123), tokenizer_hash='t', length=200)",
    "EvaluationDataset.build(np.arange(123), tokenizer_hash='t', length=200, split='dev')",
    "EvaluationDataset.build(np.arange(123), tokenizer_hash='t', length=20, limit=0)",
    "EvaluationDataset.build(np.arange(123), tokenizer_hash='t', length=20, r_max=1.5)",
    "EvaluationDataset.build(np.arange(123), tokenizer_hash='t', length=20, seed=-1)",
    "EvaluationDataset.build(np.arange(123), tokenizer_hash='t', length=20, seed=2**32)",
    "EvaluationDataset.build(np.arange(123), tokenizer_hash='t', length=20).require_tokenizer('u')",
    "EvaluationDataset.load('<tmp>/model/model.safetensors')",
    "acgpt.compare([], '<tmp>/report')",
    "acgpt.compare(['<tmp>/nowhere'], '<tmp>/report')",
    "acgpt.compare(['<tmp>/empty'], '<tmp>/report')",
    "acgpt.compare(['<tmp>/notes.txt'], '<tmp>/report')",
    "acgpt.compare(['<tmp>/unfinished'], '<tmp>/report')",
    "acgpt.compare(['<tmp>/model'], '<tmp>/notes.txt')",
]
CORPORA = [
    "acgpt.prepare([], '<tmp>/new')",
    "acgpt.prepare(['<tmp>/nowhere.txt'], '<tmp>/new')",
    "acgpt.prepare(['<tmp>/empty'], '<tmp>/new')",
    "acgpt.prepare(['<tmp>/binary.xyz'], '<tmp>/new')",
    "acgpt.prepare(['<tmp>/blank.txt'], '<tmp>/damaged/new', tokenizer='<tmp>/model')",
    "acgpt.prepare(['<tmp>/notes.txt', '<tmp>/notes.txt'], '<tmp>/new')",
    "acgpt.prepare(['<tmp>/notes.txt', '<tmp>/notes.*'], '<tmp>/new')",
    "acgpt.prepare(['<tmp>/notes.txt', 'test=<tmp>/notes.txt'], '<tmp>/new')",
    "acgpt.prepare(['<tmp>/*.csv'], '<tmp>/new')",
    "acgpt.prepare(['<tmp>/mixed'], '<tmp>/new')",
    "acgpt.prepare(['test=<tmp>/nowhere.txt'], '<tmp>/new')",
    "acgpt.prepare(['test=fineweb'], '<tmp>/new')",
    "acgpt.prepare(['<tmp>/notes.txt'], '<tmp>/model')",
    "acgpt.prepare(['<tmp>/notes.txt'], '<tmp>/notes.txt')",
    "acgpt.prepare(['<tmp>/notes.txt'], '<tmp>/notes.txt/new')",
    "acgpt.prepare(['<tmp>/notes.txt'], '<tmp>/new', validation=0.9)",
    "acgpt.prepare(['<tmp>/notes.txt'], '<tmp>/new', validation=math.nan)",
    "acgpt.prepare(['<tmp>/notes.txt', 'validation=<tmp>/latin1.txt'], '<tmp>/new', validation=0.1)",
    "acgpt.prepare(['test=<tmp>/notes.txt'], '<tmp>/new', validation=0.1)",
    "acgpt.prepare(['<tmp>/notes.txt'], '<tmp>/new', seed=-1)",
    "acgpt.prepare(['<tmp>/notes.txt'], '<tmp>/new', seed=2**32)",
    "acgpt.prepare(['<tmp>/notes.txt'], '<tmp>/new', limit=0)",
    "acgpt.prepare(['<tmp>/notes.txt'], '<tmp>/new', workers=0)",
    "acgpt.prepare(['<tmp>/notes.txt'], '<tmp>/new', tokenizer='<tmp>/nowhere')",
    "acgpt.prepare(['<tmp>/notes.txt'], '<tmp>/new', train_tokenizer=5)",
    "acgpt.prepare(['<tmp>/notes.txt'], '<tmp>/new', train_tokenizer=500, tokenizer='gpt2')",
    "acgpt.prepare(['<tmp>/notes.txt'], '<tmp>/new', convention='words')",
    "acgpt.prepare(['<tmp>/notes.txt'], '<tmp>/new', shard_bytes=10)",
    "acgpt.prepare(['<tmp>/notes.txt:tset'], '<tmp>/new')",
    "Corpus.open('<tmp>/nowhere')",
    "Corpus.open('<tmp>/corpus').tokens('test')",
    "Corpus.open('<tmp>/corpus').tokens('train')[::2]",
    "Corpus.open('<tmp>/corpus').tokens('train').chunks(0)",
    "Corpus.open(damaged(text('corpus.json', '[]'), 'corpus'))",
    "Corpus.open(damaged(text('corpus.json', '{}'), 'corpus'))",
    "Corpus.open(damaged(text('corpus.json', '{'), 'corpus'))",
    "Corpus.open(damaged(keys('corpus.json', format_version=9), 'corpus'))",
    "Corpus.open(damaged(text('corpus.json', '{\"format_version\": 1}'), 'corpus'))",
    "Corpus.open(damaged(cut('train-00000.bin', 0), 'corpus')).tokens('train')",
    "Corpus.open(damaged(cut('train-00000.bin', 100), 'corpus')).tokens('train')",
]
TABLES = {
    "templates": TEMPLATES,
    "queries": QUERIES,
    "sampling": SAMPLING,
    "models": MODELS,
    "conditioning": CONDITIONING,
    "recipes": RECIPES,
    "experiments": EXPERIMENTS,
    "training": TRAINING,
    "measuring": MEASURING,
    "corpora": CORPORA,
}
OWN = (acgpt.InputError, acgpt.OutputError, acgpt.ServerError)


@pytest.fixture(scope="session")
def names(room: Room) -> dict[str, Any]:
    """What the expressions can use."""
    lm = tiny_lm()
    maskless = acgpt.LanguageModel(lm.model, lm.tokenizer, metadata=acgpt.Metadata())

    def damaged(damage: Callable[[Path], Any], of: str = "model") -> Path:
        """Return a copy of a folder that is damaged."""
        copy = room.folder / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(room.folder / of, copy)
        damage(copy)
        return copy

    damages = {one.__name__: one for one in (cut, index, keys, last_is_nan, tensors, text, without)}
    public = (Conditioning, Corpus, EvaluationDataset, Query)
    public += (generator, load_experiment, load_recipe, run_experiment, train)
    models = {"lm": lm, "maskless": maskless, "predicting": tiny_lm(lengths=True)}
    others = {"acgpt": acgpt, "np": np, "math": math, "damaged": damaged, "grid": room.grid}
    return models | damages | others | {one.__name__: one for one in public}


def error_of(expression: str, names: dict[str, Any], room: Room) -> str:
    """Return the error that an expression raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            eval(room.real(expression), names)
    except OWN as error:
        return room.told(f"{type(error).__name__}: {error}")
    except (NameError, SyntaxError, AssertionError):
        raise  # the case is wrong
    except Exception as error:
        return type(error).__name__
    return "no error"


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("table", TABLES)
def test_errors_of_the_python_api(
    table: str, names: dict[str, Any], room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(room.folder)
    before = room.files()
    errors = {case: error_of(case, names, room) for case in TABLES[table]}
    assert [case for case, error in errors.items() if error == "no error"] == []
    assert room.files() == before  # a call that is refused writes nothing
    check(f"python-{table}", errors)
