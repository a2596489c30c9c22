//! The retry schedule: how long a failing destination is left alone, and how long to wait between the tries of one
//! attempt.

use std::time::Duration;

use rand::{Rng, RngExt};

use crate::{
    config::Retry,
    core::{clock::Millis, store::RetryTimings},
};

/// Waits are multiplied by a number drawn from here, so that destinations that failed together do not return together.
const JITTER: std::ops::Range<f64> = 0.8..1.4;

/// The longest interval that is ever stored, ms: what Synapse caps its own setting at.
const INTERVAL_CEILING: f64 = 4_611_686_018_427_387_904.0;

/// The timings after one more failed attempt at `now`.
///
/// One attempt is one step, however many tries it made.
#[must_use]
pub fn after_failure(before: RetryTimings, now: Millis, policy: &Retry, rng: &mut impl Rng) -> RetryTimings {
    let interval = if before.interval == 0 {
        millis(policy.min_interval)
    } else {
        #[expect(clippy::cast_precision_loss, reason = "an interval is far below 2^53 ms")]
        let grown = before.interval as f64 * policy.multiplier * rng.random_range(JITTER);
        #[expect(clippy::cast_possible_truncation, reason = "capped at 2^62")]
        let grown = grown.min(INTERVAL_CEILING) as i64;
        grown.min(millis(policy.max_interval))
    };
    RetryTimings {
        last_tried: now,
        interval,
        failing_since: Some(before.failing_since.unwrap_or(now)),
    }
}

/// How long to wait before try number `retry` (from 1) of one attempt; `None` if the attempt is over.
#[must_use]
pub fn before_retry(retry: u32, policy: &Retry, rng: &mut impl Rng) -> Option<Duration> {
    if retry > policy.attempt_retries {
        return None;
    }
    let wait = Duration::from_secs(4_u64.saturating_pow(retry)).min(policy.attempt_max_delay);
    Some(wait.mul_f64(rng.random_range(JITTER)))
}

/// How long to wait before asking again a destination that is busy with an earlier transaction of ours (429);
/// `None` if it was asked often enough to call the attempt failed.
#[must_use]
pub fn before_asking_a_busy_one(times: u32, retry_after: Option<Duration>, policy: &Retry) -> Option<Duration> {
    const TIMES: u32 = 10;
    if times > TIMES {
        return None;
    }
    let wait = retry_after.unwrap_or(Duration::from_millis(250 << times.min(8)));
    Some(wait.clamp(
        Duration::from_millis(100),
        policy.attempt_max_delay.max(Duration::from_millis(100)),
    ))
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::{SeedableRng, rngs::SmallRng};

    use super::*;

    fn policy() -> Retry {
        Retry {
            min_interval: Duration::from_mins(10),
            multiplier: 2.0,
            max_interval: Duration::from_hours(168),
            attempt_retries: 10,
            attempt_max_delay: Duration::from_mins(1),
        }
    }

    #[test]
    fn the_first_failure_costs_the_least_interval_and_the_next_about_twice_that() {
        let mut rng = SmallRng::seed_from_u64(1);
        let first = after_failure(RetryTimings::default(), Millis(5_000), &policy(), &mut rng);
        assert_eq!(
            first,
            RetryTimings {
                last_tried: Millis(5_000),
                interval: 600_000,
                failing_since: Some(Millis(5_000)),
            }
        );
        let second = after_failure(first, Millis(700_000), &policy(), &mut rng);
        assert!((960_000..1_680_000).contains(&second.interval), "{second:?}");
        assert_eq!(second.failing_since, Some(Millis(5_000)));
    }

    #[test]
    fn the_tries_of_an_attempt_are_spread_over_minutes_and_end() {
        let mut rng = SmallRng::seed_from_u64(1);
        let waits: Vec<_> = (1..)
            .map_while(|retry| before_retry(retry, &policy(), &mut rng))
            .collect();
        assert_eq!(waits.len(), 10);
        for (wait, base) in waits
            .iter()
            .zip([4.0, 16.0, 60.0, 60.0, 60.0, 60.0, 60.0, 60.0, 60.0, 60.0])
        {
            assert!(
                (base * 0.8..base * 1.4).contains(&wait.as_secs_f64()),
                "{wait:?} for {base}"
            );
        }
    }

    #[test]
    fn a_busy_destination_is_asked_again_soon_but_not_for_ever() {
        let wait = before_asking_a_busy_one(1, None, &policy()).unwrap();
        assert_eq!(wait, Duration::from_millis(500));
        let hour = Duration::from_hours(1);
        assert_eq!(
            before_asking_a_busy_one(1, Some(hour), &policy()),
            Some(Duration::from_mins(1))
        );
        assert_eq!(before_asking_a_busy_one(11, None, &policy()), None);
    }

    proptest! {
        #[test]
        fn an_interval_never_leaves_its_bounds(interval in 0_i64..=i64::MAX, seed: u64) {
            let before = RetryTimings { interval, ..RetryTimings::default() };
            let after = after_failure(before, Millis(1), &policy(), &mut SmallRng::seed_from_u64(seed));
            prop_assert!((1..=604_800_000).contains(&after.interval));
        }
    }
}
