"""Mistakes that break the guarantee, each made by changing a few lines of the package.

`test_mistakes.py` makes each one in a copy of the package and expects a test file to
fail. When you rewrite a module, keep its sentences and restate the changes against the
new code; drop a sentence only if its mechanism is gone.

An entry is a sentence that states the fault; `@`, the source file (in `tfdpsq/`) and
the test file (in `tests/`); the text to replace (`-`), which occurs exactly once in the
source and may begin or end within a line; and its replacement (`+`).
"""

from typing import NamedTuple


class Mistake(NamedTuple):
    """One mistake: what is wrong with it, and how it is made and noticed."""

    fault: str
    source: str
    test: str
    old: str
    new: str


CLIPPING = """
The norm of a weight that is used twice leaves out the cross terms of its uses.
@ privacy/fast/engine.py privacy/test_fast.py
- squares = [gradient_norms.squared_norms(uses) for uses in merged if uses]
+ squares = [gradient_norms.squared_norms([u]) for uses in by_row for u in uses]

The norm of a tied embedding leaves out the product of its lookups and its logits.
@ privacy/fast/gradient_norms.py privacy/test_fast.py
- terms.append(2 * _total(met * _gram(
+ terms.append(0 * _total(met * _gram(

Of a Gram matrix that XLA computes by halves only one half counts.
@ privacy/fast/gradient_norms.py privacy/test_fast.py
- [2.0] * positions
+ [1.0] * positions

A token that a text holds twice counts as two different rows of the embedding.
@ privacy/fast/gradient_norms.py privacy/test_fast.py
- use.ids[:, :, tf.newaxis] == use.ids[:, tf.newaxis, :]
+ tf.eye(tf.shape(use.ids)[1], dtype=tf.bool)[tf.newaxis]

An embedding tied to the logits is clipped by its lookups alone.
@ privacy/fast/rules.py privacy/test_fast.py
- record.outer(weight, inputs, output, transposed=layer.tie_weights)
+ layer.tie_weights or record.outer(weight, inputs, output)

Gradients of layers that are run again in the backward pass are lost.
@ privacy/fast/recorder.py privacy/test_fast_t5.py
- found = [list(uses) for uses in self._adopted]
+ found = [[] for _ in self.variables]

Rematerialization lets one example's NaN into the gradients of all others.
@ rematerialization.py test_rematerialization.py
- zero = tf.where(tf.math.is_nan(first), tiny, tf.zeros_like(tiny))
+ zero = 0 * first + 0 * tf.reduce_sum(first)

Gradients are clipped by the norms of a second forward pass, whose dropout differs.
@ privacy/fast/engine.py privacy/test_fast.py
-     finite = tf.math.is_finite(bounds)
+     if clip_norm != 1.0:
+         again = clipped_sum(per_example_losses, layers, variables, 1.0)
+         bounds = again.norms
+     finite = tf.math.is_finite(bounds)

A weight that no clipping rule covers is skipped in silence.
@ privacy/fast/engine.py privacy/test_fast.py
- for stray, _ in recorder.strays:
+ for stray in ():

In the fast engine a row with a NaN gradient spoils the sum of its microbatch.
@ privacy/fast/engine.py privacy/test_optimizers.py
- tf.reduce_all(finite),
+ tf.constant(True),

In tensorflow-privacy's engines a row with a NaN gradient spoils the sum.
@ privacy/engines.py privacy/test_optimizers.py
- finite = tf.math.is_finite(squared)
+ finite = tf.fill(tf.shape(squared), True)

A row with a NaN gradient takes all other rows of its microbatch with it.
@ privacy/step.py privacy/test_optimizers.py
- if clipped.complete is True:
+ if True:

Means of two rows are clipped at C, so that one row moves the sum by 2C.
@ privacy/engines.py privacy/test_optimizers.py
- units = losses.shape[0] // together
+ units = losses.shape[0] // (2 * together)

Each row of a user is clipped by itself, so that the user's k rows add k·C.
@ privacy/engines.py privacy/test_optimizers.py
- rows_per_unit=plan.rows_clipped_together,
+ rows_per_unit=1,

A user's rows are dealt to several replicas, each of which clips its part at C.
@ privacy/step.py privacy/test_trajectories.py
- microbatches = values.reshape(-1, microbatch_size, *
+ microbatches = values.reshape(-1, 1, *

The norm is taken over the first weight alone.
@ privacy/fast/engine.py privacy/test_fast.py
- gradient_norms.norm_and_bound(squares)
+ gradient_norms.norm_and_bound(squares[:1])

Padding rows inside a user's group count in the user's norm.
@ privacy/fast/engine.py privacy/test_fast_units.py
- by_row = factored.cleaned(by_row, weights > 0)
+ pass

Batch normalisation is let through, though its rows read each other.
@ privacy/fast/engine.py privacy/test_fast_refusals.py
- couples_examples(layer) or _has_wanted_weight(layer, recorder)
+ _has_wanted_weight(layer, recorder)

A weight listed twice is clipped once and trained twice.
@ privacy/fast/recorder.py privacy/test_checks.py
- if keys[place] in keys[:place]:
+ if False:

A loss that reads other rows, such as an undeclared in-batch softmax, is accepted.
@ privacy/checks.py privacy/test_checks.py
- before = run(batch)[0]
+ return
+     before = run(batch)[0]

A loss that skips a whole batch when one row is NaN is accepted.
@ privacy/checks.py privacy/test_checks.py
- for factor in (np.nan, 1e6) if
+ for factor in (1e6,) if

A `take` whose rows depend on the rows taken with them is accepted.
@ privacy/checks.py privacy/test_checks.py
- rows.require_alone()
+ pass

A forward pass may write a running mean of private rows into a weight.
@ privacy/checks.py privacy/test_checks.py
- (state and not _READS.fullmatch(node.op)):
+ False:

An id that the embedding does not have enters the norm and not the sum.
@ privacy/fast/recorder.py privacy/test_fast_units.py
- known = (ids >= 0) & (ids < variable.shape[0])
+ known = ids == ids

In the naive direct method each of M rows is taken to move by C at most, not by 2C.
@ retriever/direct_dp.py retriever/test_direct_dp.py
- return 2 * positive_integer("max_batch_size", max_batch_size) - 1
+ return positive_integer("max_batch_size", max_batch_size)

One pair is taken to move its group's clipped gradient by C at most, not by 2C.
@ retriever/direct_dp.py retriever/test_direct_methods.py
-     return 2
-
+     return 1
+

Public negatives are the other rows' documents, so that rows read each other.
@ retriever/direct_dp.py retriever/test_direct_losses.py
-             self._embeddings,
-             self._keys,
+             documents,
+             batch["document_key"],

Hard negatives mined for one private query are in the softmax of every row.
@ retriever/losses.py retriever/test_losses.py
- tf.einsum("id,ihd->ih", queries, embeddings.negatives)
+ tf.matmul(queries, tf.reduce_mean(embeddings.negatives, 0), transpose_b=True)

LoRA trains the weights that it is said to freeze.
@ layers/lora.py layers/test_lora.py
-         if id(owner) not in trained:
+         if False:
"""

NOISE_AND_KEYS = """
Every replica adds noise before the sums of the replicas are added up.
@ privacy/step.py privacy/test_statistics.py
- sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, list(sums))
+ sums = noised(sums, setup.plan.noise_stddev, keys.noise, keys.number)
+             sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, list(sums))

Replicas draw different noise, so that their copies of the weights drift apart.
@ privacy/step.py privacy/test_statistics.py
- estimate = privatized(setup.plan, sums, noise, keys)
+ keys = keys._replace(noise=keys.noise + first)
+         estimate = privatized(setup.plan, sums, noise, keys)

Noise is added once per microbatch as well as once per logical step.
@ privacy/step.py privacy/test_statistics.py
- clipped = self.of_microbatch(part, number, keys)
+ clipped = self.of_microbatch(part, number, keys)
+             deviation = setup.plan.noise_stddev
+             new = noised(clipped.sums, deviation, keys.noise, 99 + number)
+             clipped = clipped._replace(sums=new)

Weights of one shape get the same noise, which their difference cancels.
@ privacy/randomness/noise.py privacy/test_statistics.py
- draw_key(own, step, position)
+ draw_key(own, step, 0)

Every step adds the same noise, which the difference of two steps cancels.
@ privacy/randomness/noise.py privacy/test_statistics.py
- draw_key(own, step, position)
+ draw_key(own, 0, position)

A weight's noise is that of the next weight one step earlier.
@ privacy/randomness/noise.py privacy/test_statistics.py
- upper = tf.bitwise.bitwise_xor(second, tf.cast(step, tf.int64))
+ upper = second
+     lower += tf.cast(step, tf.int64) * (1 << _BLOCK_BITS)

The noise is bounded: a Gaussian cut off at two deviations.
@ privacy/randomness/noise.py privacy/test_statistics.py
- tf.sqrt(-2 * tf.math.log(uniform_of(first)))
+ tf.minimum(tf.sqrt(-2 * tf.math.log(uniform_of(first))), 2.0)

The sum of two draws has the deviation of one of them divided by two, not by √2.
@ privacy/randomness/noise.py privacy/test_statistics.py
- tf.add_n(drawn) / len(keys) ** 0.5
+ tf.add_n(drawn) / len(keys)

The pairs of numbers that noise is made of go round half of the circle only.
@ privacy/randomness/noise.py privacy/test_statistics.py
- (math.pi * 2.0**-31)
+ (math.pi * 2.0**-32)

Noise comes from a seed that is written in the source.
@ privacy/keys.py privacy/test_statistics.py
- fresh_seed(secure) if seed is None else seed
+ 0 if seed is None else seed

Half of a noise key's bits are dropped, so that it can be guessed.
@ privacy/randomness/noise.py privacy/test_statistics.py
- tf.bitcast(first[tf.newaxis], tf.uint64),
+ tf.cast(tf.cast(first[tf.newaxis], tf.uint32), tf.uint64),

Noise is scaled to the clip norm where one unit can move the sum by more.
@ privacy/plan.py privacy/test_statistics.py
- return self.noise_multiplier * self.sensitivity
+ return self.noise_multiplier * self.spec.clip_norm

The update is divided by the number of rows drawn, not by the expected number.
@ privacy/step.py privacy/test_optimizers.py
- estimate = privatized(setup.plan, sums, noise, keys)
+ estimate = privatized(setup.plan, sums, noise, keys)
+         realised = setup.plan.spec.batch_size / tf.maximum(count, 1)
+         estimate = [value * tf.cast(realised, value.dtype) for value in estimate]

A step that draws nobody is skipped, so that weights without noise show it.
@ privacy/training.py privacy/test_statistics.py
- draw, named = self.sampler.draw(number), f"step {number + 1}"
+ draw, named = self.sampler.draw(number), f"step {number + 1}"
+         if not draw.count:
+             return 0.0

The optimizer counts one iteration per microbatch, not one per logical step.
@ privacy/step.py privacy/test_trajectories.py
- part = _slice(batch, index * size, size)
+ part = _slice(batch, index * size, size)
+             optimizer.iterations.assign_add(tf.cast(index > 0, tf.int64))

Noise seeds are constants of the graph, which dumps and profiles contain.
@ privacy/step.py privacy/test_statistics.py
- return self._strategy.run(step, args=given)
+ keys = key.step_keys(given[3].number)
+             return self._strategy.run(step, args=(*given[:3], keys))

Weights that no row touches get no noise, and show which words nobody wrote.
@ privacy/randomness/noise.py privacy/test_statistics.py
- found.append(value + tf.cast(stddev, value.dtype) * drawn)
+ some = tf.cast(value != 0, value.dtype) * tf.cast(stddev, value.dtype)
+         found.append(value + some * drawn)

Dropout is drawn from the same bits as the noise.
@ privacy/keys.py privacy/test_optimizers.py
- as_words(derived_seed(seed, "dropout"))
+ as_words(derived_seed(seed, "noise 0"))

Noise and sampling share a seed: who learns the rows drawn can subtract the noise.
@ privacy/keys.py privacy/test_statistics.py
- SecureSource(seed) if secure else derived_seed(seed, "sampler")
+ SecureSource(seed) if secure else derived_seed(seed, "noise 0")

All microbatches of a step have the same dropout masks.
@ privacy/replay.py privacy/test_randomness.py
- part = tf.cast(microbatch, tf.int64)
+ part = tf.zeros([], tf.int64)

Dropout that all rows share, as by `noise_shape=(1, None)`, is accepted.
@ privacy/checks.py privacy/test_randomness.py
- if not shape.rank or not shape[0] or shape[0] % rows:
+ if not shape.rank or not shape[0]:
"""

SAMPLING_AND_WEIGHTS = """
Batches have a fixed size where the accounting is of Poisson sampling.
@ privacy/randomness/sampling.py privacy/test_statistics_sampling.py
- drawn = random.binomial(self.n, self.sampling_probability)
+ drawn = round(self.n * self.sampling_probability)

A unit can be in one batch twice.
@ privacy/randomness/sampling.py privacy/test_statistics_sampling.py
- self.n, size=min(int(drawn), self.max_batch_size), replace=False
+ self.n, size=min(int(drawn), self.max_batch_size)

A batch that is too large keeps its first rows, not a random subset.
@ privacy/randomness/sampling.py privacy/test_statistics_sampling.py
-             self.n, size=min(int(drawn), self.max_batch_size), replace=False
-         )
+             self.n, size=int(drawn), replace=False)
+         chosen = np.sort(chosen)[: self.max_batch_size]

The sampling probability follows from the number of units in place of its public bound.
@ privacy/plan.py privacy/test_plan.py
- units, self.sampling_probability, self.max_batch_size, seed
+ units, spec.batch_size / units, self.max_batch_size, seed

A draw is cut into microbatches in order, so that one pair more shifts all others.
@ privacy/randomness/sampling.py privacy/test_statistics_sampling.py
- dealt = random.integers(self.num_microbatches, size=drawn.count)
+ dealt = np.arange(drawn.count) % self.num_microbatches

Units are dealt to microbatches by the random bits that they were sampled with.
@ privacy/randomness/sampling.py privacy/test_statistics_sampling.py
- random = _generator(self.units.seed, step, "dealing")
+ random = _generator(self.units.seed, step, "units")

Consecutive batches of a shuffled epoch share a unit.
@ privacy/randomness/sampling.py privacy/test_plan.py
- start = batch * self.max_batch_size
+ start = batch * (self.max_batch_size - 1)

Rows are drawn one by one where users are protected.
@ privacy/plan.py privacy/test_plan.py
- if groups is None:
-             return chosen
+ return chosen

Padding rows take part in training.
@ privacy/engines.py privacy/test_optimizers.py
- weights=weights,
+ weights=tf.ones_like(weights),

Padding rows hold row 0 of the data, which a loss over the batch then reads.
@ privacy/batches.py privacy/test_training.py
- batch[name][weights == 0] = 0
+ pass

The places that a user with few rows leaves empty count as row 0.
@ privacy/batches.py privacy/test_training.py
- weights[: draw.count] = draw.weights[: draw.count]
+ weights[: draw.count] = 1

More units are drawn from than the bound that truncation was accounted for.
@ privacy/plan.py privacy/test_plan.py
- if units > spec.num_units or (
+ if (

Each of several workers samples by a seed of its own.
@ privacy/keys.py privacy/test_workers.py
- seed = workers.chiefs_number(
+ seed = int(

Under unit `query` a query is in as many rows as it has documents.
@ data/beir.py data/test_beir.py
- 1 if best else _ALL
+ _ALL

All queries without an owner are one user.
@ data/texts.py data/test_beir.py
- text = "" if text in _MISSING else text
+ pass
"""

ACCOUNTING_AND_COMPOSITION = """
Shuffled batches are accounted for as Poisson samples.
@ privacy/plan.py privacy/test_plan.py
- if self.spec.sampler == "poisson":
+ if True:

Truncating large batches costs no δ.
@ privacy/plan.py privacy/test_spec.py
- return accounting.truncation_delta(
+ return 0 * accounting.truncation_delta(

The δ that truncation costs is spent again on the noise.
@ privacy/plan.py privacy/test_plan.py
- left = delta - sum(plan.truncation_delta(steps) for plan, steps in runs)
+ left = delta

Truncation is priced as if a batch that is just full had room for one unit more.
@ privacy/accounting.py privacy/test_plan.py
- scipy.stats.binom.sf(max_batch_size - 1, n - 1, sampling_probability)
+ scipy.stats.binom.sf(max_batch_size, n - 1, sampling_probability)

The ε of one step is stated for all of them.
@ privacy/accounting.py privacy/test_accounting.py
- return dp_accounting.SelfComposedDpEvent(one, steps)
+ return dp_accounting.SelfComposedDpEvent(one, 1)

The rounding errors of PLD's Fourier transforms make ε too small.
@ privacy/accounting.py privacy/test_accounting.py
- get_epsilon(delta - rounding)
+ get_epsilon(delta)

A δ of 1/n is accepted, at which one record may be published.
@ privacy/spec.py privacy/test_spec.py
- self.delta >= 1 / n,
+ self.delta >= 1,

An epoch that was begun is not counted as a release of every unit.
@ privacy/plan.py privacy/test_plan.py
- -(-steps // steps_per_epoch)
+ max(1, steps // steps_per_epoch)

The total of several releases is that of the first.
@ privacy/proof/budget.py privacy/test_budget.py
- [_together(group, delta) for group in groups]
+ [_together(group[:1], delta) for group in groups]

Two runs of the same settings count as one.
@ privacy/proof/certificate.py privacy/test_budget.py
- key = self.run_id or
+ key = self.plan.fingerprint or

Releases from pairs that are not known to be the same are composed as one log.
@ run/stages/verify.py run/test_verify.py
- one_log = name or
+ one_log = True or

A guarantee for queries is composed with one for users.
@ privacy/proof/budget.py privacy/test_budget.py
- if len(units) > 1:
+ if len(units) > 2:

Users who search every month are taken to be in one of the monthly logs alone.
@ privacy/proof/budget.py privacy/test_budget.py
- return disjoint == "user" or unit != "user"
+ return True

The certificate of a run that continues another states the cost of the last run alone.
@ privacy/proof/certificate.py privacy/test_continuation.py
- budget.compose(budget.sharing(self.runs()))
+ budget.compose(budget.sharing(self.runs()[:1]))

A run that was stopped for what its weights showed costs only the steps that it took.
@ privacy/proof/budget.py privacy/test_budget.py
- (run.plan, run.plan.spec.steps) for run in runs]
+ (run.plan, run.steps) for run in runs]
"""

LEDGER_AND_RESUME = """
A step is paid for after its update.
@ privacy/training.py privacy/test_paid_steps.py
-         require_same_rows(batch)
+         loss = self.take_step(batch, draw.count, number)
+         self._pay(range(number, number + 1))
+         return loss

A step that is repeated after a kill is paid for twice.
@ privacy/proof/ledger.py privacy/test_ledger.py
-         if 0 <= step < paid:
+         if step < 0:

The ledger takes more steps than its plan has.
@ privacy/proof/ledger.py privacy/test_ledger.py
-         if step >= self.steps_allowed:
+         if False:

A ledger goes on with other private data than it was opened for.
@ privacy/proof/ledger.py privacy/test_ledger.py
- ("the private data", found.data, wanted.data),

A resumed run samples by a fresh seed and repeats paid steps on other rows.
@ privacy/training.py privacy/test_resume.py
- plan.sampler(count, key.sampler, groups)
+ plan.sampler(count, None, groups)

A resumed run repeats paid steps with fresh noise, which can be averaged.
@ privacy/training.py privacy/test_resume.py
- RunKey(plan, kept.secrets.seed if kept is not None else seed)
+ RunKey(plan, seed)

A resumed run starts from fresh optimizer slots.
@ privacy/training.py privacy/test_resume.py
- restored = [*variables, *slots, *state]
+ restored = [*variables, *state]

A step that is repeated has other dropout masks.
@ privacy/step.py privacy/test_replicas.py
- def losses() -> tf.Tensor:
-             with replayable(layers, keys
+ def losses() -> tf.Tensor:
+             with replayable([], keys

The seeds of one run go on under the ledger of another.
@ privacy/checkpoint.py privacy/test_kept_seeds.py
- if kept.run != run:
+ if False:

A ledger older than the saved state, as from a backup, is begun again.
@ privacy/proof/ledger.py privacy/test_ledger.py
- if found.steps_paid < steps_taken:
+ if found.steps_paid < 0:

A run whose saved state is lost begins again at no price.
@ privacy/checkpoint.py privacy/test_resume.py
-         if steps_paid:
-             raise _spent(
+         if False:
+             raise _spent(

A paid step is still in the page cache when its update happens.
@ privacy/proof/ledger.py privacy/test_lines.py
-                     raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
-                 os.fsync(self._descriptor)
+                     raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

Two processes pay for steps in one ledger.
@ privacy/proof/ledger.py privacy/test_ledger.py
- fcntl.flock(self._descriptor, how)
+ fcntl.flock(self._descriptor, fcntl.LOCK_SH)

A run that a hook stops, which may have seen losses, pays for its own steps alone.
@ privacy/training.py privacy/test_paid_steps.py
-             if stop:
-                 self._pay(range(done, steps))
-                 break
+             if stop:
+                 return done

A run that diverges, which private rows decide, pays only for the steps that it took.
@ privacy/training.py privacy/test_replicas.py
- raise Diverged(steps, diverged_at, done)
+ raise Diverged(done, diverged_at, done)

The rehearsed step, which nobody pays for, stays in the weights.
@ privacy/training.py privacy/test_training.py
-             raise
-         self._restored()
+             raise

A model that draws from a stateful generator, and so cannot repeat a step, is accepted.
@ privacy/checks.py privacy/test_before_spending.py
- if _DRAWS_FROM_STATE.fullmatch(node.op) or keyless:
+ if keyless:

One optimizer serves two runs, and the second run's ε leaves out the first.
@ privacy/optimizers.py privacy/test_optimizers.py
- if int(tf.convert_to_tensor(optimizer.iterations)):
+ if False:
"""

CERTIFICATE_AND_READS = """
The certificate states the target ε, not that of the steps paid for.
@ privacy/proof/certificate.py privacy/test_certificate.py
- epsilons = {name: plan.epsilon(steps, name) for name in ("pld", "rdp")}
+ epsilons = {name: spec.epsilon for name in ("pld", "rdp")}

The certificate states the smaller ε of two accountants.
@ privacy/proof/certificate.py privacy/test_certificate.py
- "epsilon": epsilons[spec.accountant],
+ "epsilon": min(epsilons.values()),

`verify` believes the ε that a certificate states.
@ privacy/proof/certificate.py privacy/test_verification.py
- return expected * (1 - lower) <= stated <= expected * (1 + higher)
+ return True

`verify` does not compare a certificate with the ledger beside it.
@ privacy/proof/certificate.py privacy/test_verification.py
- if stated != paid
+ if stated is None

What is made from a certified and an unprotected artefact has a finite ε.
@ privacy/proof/certificate.py privacy/test_certificate.py
- for certificate in present:
-         if not certificate["private"]:
+ for certificate in present:
+         if certificate["private"]:

A model directory that was copied without its certificate is taken for public.
@ privacy/proof/certificate.py privacy/test_certificate.py
- if digest is not None and (
+ if digest is not None is not certificate and (

The exact number of private queries is published where a bound was declared.
@ run/common/training.py run/test_finetune.py
- return Units(rows, count, groups, True, s.n_bound or count)
+ return Units(rows, count, groups, True, count)

Strict mode allows reads of private data that no ε covers.
@ privacy/proof/ledger.py privacy/test_reads.py
-         if self.strict:
+         if False:

Evaluation on private queries is not recorded as a read.
@ run/stages/evaluate.py run/test_evaluate_stage.py
- found = [(f"{judged} split {s.split!r}", where)]
+ found = []

The certificate leaves out the reads that no ε covers.
@ run/common/training.py run/test_finetune.py
- private_reads=records.private_reads(c.place.private).entries,
+ private_reads=[],

Weights that were loaded or changed after `fit` get the certificate of the fit.
@ privacy/model.py privacy/test_callbacks.py
- if not facts or digest_of_weights(weights) != facts["weights"]:
+ if not facts:

Statistics that a layer adapted to private rows are released undeclared.
@ privacy/model.py privacy/test_model_certificate.py
- if found and not self._adapted_to:
+ if found and self._adapted_to == "private":
"""

RELEASES = """
The seed of the noise is in the released record.
@ run/stages/finetune.py run/test_release_secrets.py
-             facts = {
+             with open(f"{c.place.run}/state/secrets.json") as file:
+                 held = __import__("json").load(file)
+             facts = {"seed": held["seed"],

The released record says how long a private stage took.
@ run/frame/runner.py run/test_frame.py
-     return records.write_stage(
+     result = {**result, "seconds": os.times().elapsed}
+     return records.write_stage(

Fingerprints of private pairs are made with a known key, so that guesses can be tested.
@ run/frame/records.py run/test_frame.py
- hmac.new(bytes.fromhex(key),
+ hmac.new(b"tfdpsq",

An unprotected output is allowed under `release/`.
@ run/frame/places.py run/test_releases.py
- if privacy < Privacy.PRIVATE or (PRIVATE in parts and RELEASE not in parts):
+ if True:

What is made from an input marked private, such as canaries, is certified.
@ run/frame/runner.py run/test_lineage.py
- found = given.privacy(covered)
+ found = min(given.privacy(covered), Privacy.CERTIFIED)

The vocabulary is learnt from private queries as well as from public documents.
@ run/stages/prepare.py run/test_prepare.py
- texts = (document.content for document in beir.documents())
+ texts = [d.content for d in beir.documents()] + [*beir.queries().values()]

An error quotes the value of a private row that an operation refused.
@ privacy/batches.py privacy/test_before_spending.py
- except tf.errors.OpError as error:
+ except tf.errors.AlreadyExistsError as error:
"""

PRECISION_AND_SECURE = """
Norms are summed up in bfloat16 under mixed precision.
@ privacy/fast/factored.py privacy/test_fast.py
- return values if values.dtype == tf.float64 else tf.cast(values, tf.float32)
+ return values

Rows are clipped by the computed norm, which rounding can make too small.
@ privacy/fast/engine.py privacy/test_precision.py
- tf.constant(clip_norm, bounds.dtype) / bounds, 1.0
+ tf.constant(clip_norm, bounds.dtype) / norms, 1.0

TensorFloat-32 stays on in a private step.
@ privacy/step.py privacy/test_precision.py
- return fast.true_float32() if private else
+ return contextlib.nullcontext() if private else

In secure mode every step uses the same nonce, and so the same noise.
@ privacy/randomness/secure.py privacy/test_statistics.py
- source.stream("noise", step, position)
+ source.stream("noise", 0, position)

In secure mode sampling and noise are drawn with one key.
@ privacy/randomness/secure.py privacy/test_secure.py
- _LABEL + purpose.encode()
+ _LABEL

In secure mode the noise is made for sums before they are rounded to the grid.
@ privacy/plan.py privacy/test_secure.py
- of_sum if self.grid_step is None else of_sum * (1 + secure.ROUNDING)
+ of_sum
"""

_THEMES = (
    CLIPPING,
    NOISE_AND_KEYS,
    SAMPLING_AND_WEIGHTS,
    ACCOUNTING_AND_COMPOSITION,
    LEDGER_AND_RESUME,
    CERTIFICATE_AND_READS,
    RELEASES,
    PRECISION_AND_SECURE,
)


def _parsed(entry: str) -> Mistake:
    fault, files, *change = entry.strip("\n").split("\n")
    source, test = files.removeprefix("@ ").split()
    old = "\n".join(line[2:] for line in change if line[:1] == "-")
    new = "\n".join(line[2:] for line in change if line[:1] == "+")
    return Mistake(fault, source, test, old, new)


MISTAKES = [_parsed(entry) for theme in _THEMES for entry in theme.split("\n\n")]
