//! Time that counts while the machine is suspended.
//!
//! `std::time::Instant` reads a clock that stops in suspend (Linux: `CLOCK_MONOTONIC`), so a holder
//! that slept through its deadline would wake up believing in its lease. Every deadline of a lease
//! is measured on [`Clock`] instead; `Instant` is used only for how long a thread waits.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Linux: boot time, which counts suspend. Elsewhere the monotonic clock, which counts it on macOS.
#[cfg(any(target_os = "linux", target_os = "android"))]
const CLOCK: ClockId = ClockId::Boottime;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const CLOCK: ClockId = ClockId::Monotonic;

/// A point on a [`Clock`], in nanoseconds since an arbitrary start.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Tick(u64);

impl Tick {
    pub(crate) const ZERO: Tick = Tick(0);

    pub(crate) fn from_nanos(nanos: u64) -> Tick {
        Tick(nanos)
    }

    pub(crate) fn as_nanos(self) -> u64 {
        self.0
    }

    /// `self + duration`, at most the end of time: 584 years.
    pub(crate) fn after(self, duration: Duration) -> Tick {
        Tick(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// How far `self` lies after `earlier`; zero if it does not.
    pub(crate) fn since(self, earlier: Tick) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Where deadlines read the time: the machine's clock, or one that a test moves.
#[derive(Clone)]
pub(crate) enum Clock {
    System,
    #[cfg_attr(not(test), allow(dead_code, reason = "the fake is for tests of deadlines"))]
    Fake(Arc<AtomicU64>),
}

impl Clock {
    pub(crate) fn now(&self) -> Tick {
        match self {
            Clock::System => {
                let t = clock_gettime(CLOCK);
                let seconds = u64::try_from(t.tv_sec).unwrap_or(0);
                let nanos = u64::try_from(t.tv_nsec).unwrap_or(0);
                Tick(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
            }
            Clock::Fake(nanos) => Tick(nanos.load(Ordering::SeqCst)),
        }
    }

    #[cfg(test)]
    pub(crate) fn fake() -> Clock {
        Clock::Fake(Arc::new(AtomicU64::new(1)))
    }

    /// Moves a fake on, as a suspended machine's clock does. The system's does not obey.
    #[cfg(test)]
    pub(crate) fn advance(&self, by: Duration) {
        if let Clock::Fake(nanos) = self {
            nanos.fetch_add(u64::try_from(by.as_nanos()).unwrap(), Ordering::SeqCst);
        }
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Clock({:?})", self.now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_clock_is_the_one_that_counts_suspend() {
        let before = clock_gettime(ClockId::Boottime);
        let now = Clock::System.now().as_nanos();
        let after = clock_gettime(ClockId::Boottime);
        let nanos = |t: rustix::time::Timespec| (t.tv_sec * 1_000_000_000 + t.tv_nsec) as u64;
        assert!((nanos(before)..=nanos(after)).contains(&now));
    }

    #[test]
    fn ticks_saturate_instead_of_wrapping() {
        assert_eq!(Tick::ZERO.since(Tick(7)), Duration::ZERO);
        assert_eq!(Tick(7).after(Duration::MAX), Tick(u64::MAX));
    }
}
