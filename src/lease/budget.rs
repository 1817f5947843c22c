//! The promises' bounds, computed from the options.

use std::fmt;
use std::time::Duration;

use crate::lease::options::Options;

/// What a live server and a live network take, generously: notice, statement, wake-up.
const PROMPT: Duration = Duration::from_millis(50);

/// The bounds that follow from a set of [`Options`]; `Display` prints them as a table.
///
/// P2 to P7 are the promises as the table in the README numbers them.
///
/// They hold with the server reachable for the standby, on PostgreSQL 14 or later where
/// [`session_ttl`](Options::session_ttl) is involved. On 13 the server's TCP keepalives take its
/// place for a vanished host, and nothing does for a stopped process.
///
/// # Examples
///
/// ```
/// let budget = leasehold::Options::new().budget();
/// assert_eq!(budget.silent_session_lost.as_secs(), 15);
/// ```
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Budget {
    /// P2: from the end of a session to its jobs' tokens.
    pub dead_session_lost: Duration,
    /// P3: from the start of the last answered statement to the loss by the holder's own clock.
    pub silent_session_lost: Duration,
    /// P4: from a partitioned holder's loss to the moment when the server may free its locks: the
    /// safety margin. `None` without a session time to live: then the server frees it later still.
    pub partition_margin: Option<Duration>,
    /// P5: from the last sign of a holder that vanished to the next leader. `None` without a
    /// session time to live: then TCP keepalives decide.
    pub vanished_holder_replaced: Option<Duration>,
    /// P6: from a job's return to the next leader, by notification.
    pub graceful_hand_over: Duration,
    /// P6, where notifications do not arrive, and P7: by polling.
    pub polled_hand_over: Duration,
}

impl Budget {
    pub(crate) fn of(options: &Options) -> Budget {
        let window = options.window();
        let ttl = options.ttl();
        Budget {
            dead_session_lost: PROMPT,
            silent_session_lost: window,
            partition_margin: ttl.map(|ttl| ttl.saturating_sub(window)),
            vanished_holder_replaced: ttl.map(|ttl| ttl + options.longest_retry()),
            graceful_hand_over: PROMPT,
            polled_hand_over: options.longest_retry() + PROMPT,
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let optional = |bound: Option<Duration>| match bound {
            Some(bound) => format!("{bound:?}"),
            None => "by TCP keepalives".to_owned(),
        };
        let rows = [
            ("session ended: jobs told", format!("{:?}", self.dead_session_lost)),
            ("session silent: lease lost", format!("{:?}", self.silent_session_lost)),
            ("partition: margin before the lock is free", optional(self.partition_margin)),
            ("holder vanished: next leader", optional(self.vanished_holder_replaced)),
            ("lease released: next leader", format!("{:?}", self.graceful_hand_over)),
            ("holder killed: next leader", format!("{:?}", self.polled_hand_over)),
        ];
        for (what, bound) in rows {
            writeln!(f, "{what:<44}{bound:>18}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[cfg(not(leasehold_loom))]
mod tests {
    use super::*;
    use crate::lease::options::SessionTtl;

    #[test]
    fn the_defaults_give_the_documented_bounds() {
        let budget = Options::new().budget();
        assert_eq!(budget.silent_session_lost, Duration::from_secs(15));
        assert_eq!(budget.partition_margin, Some(Duration::from_millis(1500)));
        assert_eq!(budget.vanished_holder_replaced, Some(Duration::from_millis(22_500)));
        assert_eq!(budget.polled_hand_over, Duration::from_millis(6050));
    }

    #[test]
    fn the_table_has_a_row_for_each_bound_and_fits_a_terminal() {
        let text = Options::new().session_ttl(SessionTtl::Off).budget().to_string();
        assert_eq!(text.lines().count(), 6);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert_eq!(text.matches("by TCP keepalives").count(), 2);
    }
}
