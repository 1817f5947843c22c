//! The checker itself: a history with each violation planted, and a clean one. A checker that finds
//! nothing proves nothing.

use std::collections::HashMap;

use crate::checker::{Limits, PROMPT, Run, check};
use crate::record::{Kind, Record};
use crate::terms::{Fault, What, Where};

const MS: u64 = 1_000_000;
const LIMITS: Limits = Limits {
    heartbeat: 200 * MS,
    query: 500 * MS,
    retry: 200 * MS,
    ttl: 900 * MS,
    idle_limit: true,
};
/// Faults are over, and the name is led until the end.
const HEALED: u64 = 60_000;
const ENDED: u64 = 70_000;

/// A history in milliseconds, with one name and three replicas. Slot 2 stays a standby until the end.
struct Story(Run);

impl Story {
    fn new() -> Story {
        Story(Run {
            limits: LIMITS,
            slots: 3,
            names: 1,
            guarded: |_| false,
            records: Vec::new(),
            faults: Vec::new(),
            killed: HashMap::new(),
            hiccups: Vec::new(),
            rows: Vec::new(),
            leaked: Vec::new(),
            healed: HEALED * MS,
            ended: ENDED * MS,
        })
    }

    fn record(
        mut self,
        at: u64,
        slot: usize,
        kind: Kind,
        token: i64,
        held: bool,
        value: u64,
    ) -> Self {
        let process = slot as u32 + 100;
        let at = at * MS;
        self.0.records.push(Record { at, slot, process, kind, name: 0, token, held, value });
        self
    }

    /// A job that starts, works while it believes that it holds the lease, and returns.
    fn term(self, slot: usize, token: i64, start: u64, believed: u64, stop: u64) -> Self {
        self.record(start, slot, Kind::Start, token, true, 0)
            .record(believed, slot, Kind::Work, token, true, 0)
            .record(stop, slot, Kind::Stop, token, false, 0)
    }

    fn lost(self, slot: usize, token: i64, start: u64, believed: u64, told: u64) -> Self {
        self.record(start, slot, Kind::Start, token, true, 0)
            .record(believed, slot, Kind::Work, token, true, 0)
            .record(told, slot, Kind::Told, token, false, 1)
            .record(told, slot, Kind::Stop, token, false, 0)
    }

    fn fault(mut self, what: What, slot: usize, begin: u64, end: u64) -> Self {
        let at = Where::Slots(vec![slot]);
        let (begin, end) = (begin * MS, end * MS);
        self.0.faults.push(Fault { what, at, begin, applied: begin, heal: end, end });
        self
    }

    fn kill(mut self, slot: usize, at: u64) -> Self {
        self.0.killed.insert(slot as u32 + 100, at * MS);
        self.fault(What::Kill, slot, at, at + 100)
    }

    /// Led from `start` to the end, by slot 2.
    fn led_from(self, start: u64) -> Self {
        self.term(2, i64::MAX, start, ENDED, ENDED)
    }

    /// A violation begins so. What was planted may break other promises, too.
    fn finds(self, what: &str) {
        let verdict = check(&self.0);
        let found = verdict.violations.iter().any(|each| each.starts_with(what));
        assert!(found, "not found: {what}\n{verdict}");
    }

    fn found_clean(self) {
        let verdict = check(&self.0);
        assert!(verdict.violations.is_empty(), "{verdict}");
    }
}

#[test]
fn a_history_without_violations_found_clean() {
    Story::new()
        .term(0, 1, 10_000, 11_000, 11_001)
        .term(1, 2, 11_004, 12_000, 12_001)
        .lost(0, 3, 12_005, 20_002, 20_003)
        .fault(What::Terminate, 0, 20_000, 20_000)
        .term(1, 4, 20_001, 21_000, 21_001)
        .lost(0, 5, 21_004, 30_000, 31_501)
        .fault(What::Pause, 0, 30_000, 31_500)
        .term(1, 6, 30_950, 31_000, 31_001)
        .led_from(31_005)
        .found_clean();
}

#[test]
fn two_holders_with_their_sessions_alive_are_found() {
    let two = || Story::new().term(0, 1, 10_000, 12_000, 12_001).term(1, 2, 11_000, 11_500, 11_501);
    two().record(12_000, 0, Kind::Told, 1, false, 1).led_from(13_000).finds("P1 P4");
}

#[test]
fn a_lease_that_the_server_freed_before_its_stalled_holder_knew_is_found() {
    Story::new()
        .fault(What::Stall, 0, 10_000, 11_500)
        .lost(0, 1, 9_000, 10_680, 10_681)
        .term(2, 2, 10_650, ENDED, ENDED)
        .finds("P1 P4");
}

#[test]
fn a_holder_that_wakes_up_and_believes_in_its_lease_is_found() {
    Story::new()
        .fault(What::Pause, 0, 10_000, 13_000)
        .lost(0, 1, 9_000, 13_001, 13_010)
        .led_from(13_100)
        .finds("P3 believed");
}

#[test]
fn a_belief_that_outlives_a_dead_session_is_found() {
    Story::new()
        .fault(What::Terminate, 0, 10_000, 10_000)
        .lost(0, 1, 9_000, 10_200, 10_040)
        .led_from(10_001)
        .finds("P2 overlap");
}

#[test]
fn news_of_a_death_that_come_late_or_never_are_found() {
    Story::new()
        .fault(What::Terminate, 0, 10_000, 10_000)
        .lost(0, 1, 9_000, 10_001, 10_200)
        .led_from(10_201)
        .finds("P2 told");
    Story::new()
        .fault(What::Reset, 0, 10_000, 10_000)
        .term(0, 1, 9_000, 10_001, 10_300)
        .led_from(10_301)
        .finds("P2 told");
}

#[test]
fn a_vanished_holder_that_is_replaced_late_or_never_is_found() {
    let stopped =
        || Story::new().fault(What::Pause, 0, 10_000, 14_000).lost(0, 1, 9_000, 10_000, 14_001);
    stopped().led_from(11_100).found_clean();
    stopped().led_from(11_400).finds("P5");
    stopped().led_from(59_000).finds("P5");
}

#[test]
fn a_former_holder_that_is_struck_again_needs_no_replacement() {
    Story::new()
        .lost(0, 1, 9_000, 10_000, 13_001)
        .fault(What::Pause, 0, 10_000, 11_500)
        .term(1, 2, 10_950, 19_900, 20_000)
        .fault(What::Cut, 0, 11_600, 13_000)
        .led_from(20_005)
        .found_clean();
}

#[test]
fn a_killed_holder_that_is_replaced_late_is_found() {
    let killed = || {
        Story::new()
            .record(9_000, 0, Kind::Start, 1, true, 0)
            .record(9_900, 0, Kind::Work, 1, true, 0)
            .kill(0, 10_000)
    };
    killed().led_from(10_280).found_clean();
    killed().led_from(10_400).finds("P7 killed");
}

#[test]
fn a_standby_that_is_not_fit_excuses_a_late_take_over() {
    Story::new()
        .record(9_000, 0, Kind::Start, 1, true, 0)
        .kill(0, 10_000)
        .fault(What::Pause, 1, 9_900, 11_000)
        .fault(What::Stall, 2, 9_900, 11_000)
        .led_from(11_900)
        .found_clean();
}

#[test]
fn a_lease_that_is_unlocked_before_its_job_returned_is_found() {
    let early =
        || Story::new().term(0, 1, 10_000, 10_500, 11_000).term(1, 2, 10_900, 11_500, 11_501);
    early().led_from(11_505).finds("P6: unlocked");
}

#[test]
fn a_hand_over_that_takes_too_long_is_found() {
    Story::new().term(0, 1, 10_000, 10_500, 10_501).led_from(10_900).finds("P6 hand-over");
    // Each within a retry interval, and together not prompt.
    let mut story = Story::new();
    let slow = PROMPT / MS + 30;
    for n in 0..200 {
        let at = 10_000 + n * 3 * (100 + slow);
        story = story.term((n % 2) as usize, n as i64 + 1, at, at + 99, at + 100);
    }
    let verdict = check(&story.led_from(200_000).0);
    assert!(verdict.violations.iter().any(|each| each.starts_with("P6 hand-over")), "{verdict}");
}

#[test]
fn a_token_that_repeats_or_goes_back_is_found() {
    for second in [4, 5] {
        Story::new()
            .term(0, 5, 10_000, 10_500, 10_501)
            .term(1, second, 12_000, 12_500, 12_501)
            .led_from(12_510)
            .finds("P8");
    }
}

#[test]
fn a_guarded_row_that_was_committed_after_the_next_job_began_is_found() {
    let story = |rows: usize| {
        let mut story = Story::new()
            .term(0, 1, 10_000, 10_500, 10_501)
            .record(10_505, 1, Kind::Start, 2, true, 0)
            .record(10_506, 1, Kind::Seen, 2, false, 3)
            .record(10_600, 1, Kind::Stop, 2, false, 0)
            .led_from(10_605);
        story.0.rows = [vec![(0, 1); rows], vec![(0, 2); 7]].concat();
        story
    };
    story(3).found_clean();
    story(4).finds("P9");
    story(2).finds("P9");
}

#[test]
fn a_name_that_nobody_leads_again_is_found() {
    Story::new().term(0, 1, 10_000, 10_500, 10_501).finds("");
    Story::new().term(2, 1, 68_000, ENDED, ENDED).finds("every name led");
}

#[test]
fn what_is_left_on_the_server_is_found() {
    let mut story = Story::new().led_from(10_000);
    story.0.leaked.push("a lock".into());
    story.finds("leaked");
}

#[test]
fn a_close_that_outlives_its_bound_is_found() {
    Story::new().led_from(10_000).record(ENDED, 1, Kind::Closed, 0, false, 1100 * MS).finds("P11");
}
