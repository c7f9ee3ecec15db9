"""Plans and certificates for tests that state only what matters to them."""

from tfdpsq.privacy import PrivacySpec, make_certificate, make_plan, optimizers


def spec(**fields):
    """Returns a spec: num_units, batch_size, steps, and what differs from the usual.

    Noise for ε = 2 is found by RDP, which is faster than PLD.
    """
    usual = {"epsilon": 2.0, "clip_norm": 0.5, "accountant": "rdp"}
    return PrivacySpec(**{**usual, **fields})


def plan(**fields):
    """Returns the plan of a `spec`."""
    return make_plan(spec(**fields))


def certificate(plan, steps=None, **stated):
    """Returns the certificate of a plan's run, of all its steps unless given.

    `stated` replaces words and entries that nothing else follows from.
    """
    usual = {
        "description": "A model.",
        "sensitivity_argument": "Each loss depends on one unit alone.",
        "training": {},
        "fingerprints": {},
    }
    steps = plan.spec.steps if steps is None else steps
    return make_certificate(plan, steps, **{**usual, **stated})


def optimizer(rate=0.1, name="sgd", **options):
    """Returns a new Keras optimizer by the name that stages use."""
    return optimizers.OPTIMIZERS[name](rate, **options)
