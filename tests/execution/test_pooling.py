"""The hidden states of a step, whichever launches computed them."""

import jax.numpy as jnp
import numpy as np

from jpaged.execution.pooling import HiddenStates

NOBODY = 9


def test_one_launchs_states_are_those_of_its_tokens():
    states = HiddenStates()
    states.begin()
    states.add(jnp.arange(8.0).reshape(4, 2))
    np.testing.assert_array_equal(states.whole(), np.arange(8.0).reshape(4, 2))
    np.testing.assert_array_equal(states.rows_of(np.array([3, 0])), [3, 0])
    np.testing.assert_array_equal(states.by_row(np.array([0, NOBODY, 1, 1]), NOBODY), [0, NOBODY, 1, 1])


def test_tokens_are_found_in_whatever_launch_computed_them():
    """Five tokens in launches of four rows, which are padded: 3 and 4 first, then the others."""
    states = HiddenStates()
    states.begin(5)
    for tokens in (range(3, 5), range(3)):
        states.expect(tokens, 4)
        states.add(jnp.asarray([[float(token)] for token in tokens] + [[-1.0]] * (4 - len(tokens))))
    whole = np.asarray(states.whole())[:, 0]
    assert whole.shape == (8,)
    np.testing.assert_array_equal(whole[states.rows_of(np.arange(5))], np.arange(5))
    owners = states.by_row(np.array([0, 0, NOBODY, 1, 2]), NOBODY)
    np.testing.assert_array_equal(owners, [1, 2, NOBODY, NOBODY, 0, 0, NOBODY, NOBODY])


def test_a_step_begins_with_nothing_of_the_one_before():
    states = HiddenStates()
    states.begin(2)
    states.expect(range(2), 4)
    states.add(jnp.ones((4, 1)))
    states.begin()
    states.add(jnp.zeros((2, 1)))
    np.testing.assert_array_equal(states.whole(), np.zeros((2, 1)))
    np.testing.assert_array_equal(states.rows_of(np.array([1])), [1])
