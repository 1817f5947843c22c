//! How long to wait before trying again: doubling, capped, jittered.

use std::time::Duration;

/// The most that jitter adds to a wait, in percent.
pub(crate) const JITTER_PERCENT: u64 = 20;

/// `base` plus up to 20 % of it, so that replicas which started together drift apart.
pub(crate) fn jittered(rng: &mut fastrand::Rng, base: Duration) -> Duration {
    let spread = u64::try_from(base.as_nanos()).unwrap_or(u64::MAX) / 100 * JITTER_PERCENT;
    base.saturating_add(Duration::from_nanos(rng.u64(0..=spread)))
}

/// Waits between attempts that fail: from `first`, doubling, never more than `cap` plus jitter.
#[derive(Debug)]
pub(crate) struct Backoff {
    first: Duration,
    cap: Duration,
    next: Duration,
    rng: fastrand::Rng,
}

impl Backoff {
    pub(crate) fn new(first: Duration, cap: Duration, rng: fastrand::Rng) -> Backoff {
        let first = first.min(cap);
        Backoff { first, cap, next: first, rng }
    }

    /// The wait before the next attempt.
    pub(crate) fn next(&mut self) -> Duration {
        let wait = self.next;
        self.next = self.next.saturating_mul(2).min(self.cap);
        jittered(&mut self.rng, wait)
    }

    /// Called after a success: the next failure waits `first` again.
    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(seed: u64, n: usize) -> Vec<Duration> {
        let rng = fastrand::Rng::with_seed(seed);
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5), rng);
        (0..n).map(|_| backoff.next()).collect()
    }

    #[test]
    fn waits_double_up_to_the_cap_and_jitter_stays_within_a_fifth() {
        let base = [100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000].map(Duration::from_millis);
        for seed in 0..200 {
            for (wait, base) in waits(seed, base.len()).into_iter().zip(base) {
                assert!(wait >= base && wait <= base.mul_f64(1.2), "{wait:?} for {base:?}");
            }
        }
    }

    #[test]
    fn a_seed_replays_and_seeds_differ() {
        assert_eq!(waits(7, 9), waits(7, 9));
        assert_ne!(waits(7, 9), waits(8, 9));
    }

    #[test]
    fn a_success_starts_over() {
        let rng = fastrand::Rng::with_seed(1);
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5), rng);
        for _ in 0..8 {
            backoff.next();
        }
        backoff.reset();
        assert!(backoff.next() <= Duration::from_millis(120));
    }

    #[test]
    fn a_cap_below_the_first_wait_wins() {
        let rng = fastrand::Rng::with_seed(1);
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_millis(10), rng);
        assert!(backoff.next() <= Duration::from_millis(12));
    }
}
