"""Random Plans for random models on random meshes, judged against the naive twin and against what the costs say.

    cases       a case from a seed alone
    judge       one case, run and judged in every rank
    uses        losses without gradients, logits and decoding, judged
    __main__    a campaign of many, on forked ranks

`python -m tests.schedule.random_plans --help` says how to run one.
"""
