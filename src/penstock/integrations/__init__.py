"""penstock inside other libraries' training loops: a module for each library, which imports it.

`transformers` (Trainer, TRL's trainers, PEFT's adapters), `accelerate`, `lightning`. Nothing else in penstock
imports them; ``pip install '.[integrations]'`` in a clone installs all of them.
"""
