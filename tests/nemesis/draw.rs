//! Draws faults from a seed: the same seed gives the same faults, in the same order, of the same
//! length. Which replica a fault meets depends on who leads at that moment.

use std::time::Duration;

use fastrand::Rng;

use crate::terms::What;

/// A fault to come.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub what: What,
    /// Which name's holder, or which replica.
    pub pick: usize,
    pub length: Duration,
    /// Before the next fault, whether or not this one is over.
    pub gap: Duration,
    /// Milliseconds of delay, or percent of packets.
    pub strength: u32,
}

/// Each fault, how often, and how long it lasts in milliseconds.
const FAULTS: [(What, u32, u64, u64); 17] = [
    (What::Kill, 12, 50, 1500),
    (What::Pause, 12, 50, 2500),
    (What::Terminate, 14, 0, 0),
    (What::FreezeBackend, 6, 100, 1500),
    (What::FreezeServer, 3, 100, 1500),
    (What::StopServer, 2, 0, 600),
    (What::AbortServer, 3, 0, 600),
    (What::CrashServer, 3, 0, 600),
    (What::Stall, 10, 50, 2500),
    (What::Reset, 9, 0, 0),
    (What::Delay, 5, 300, 2000),
    (What::Cut, 6, 100, 2500),
    (What::CutIn, 3, 100, 2500),
    (What::CutOut, 3, 100, 2500),
    (What::Loss, 4, 300, 2000),
    (What::StepDown, 8, 0, 0),
    (What::Starve, 2, 300, 1000),
];

pub fn draw(rng: &mut Rng) -> Plan {
    let mut at = rng.u32(0..FAULTS.iter().map(|fault| fault.1).sum());
    let (what, _, shortest, longest) = FAULTS
        .into_iter()
        .find(|(_, weight, ..)| {
            let hit = at < *weight;
            at = at.saturating_sub(*weight);
            hit
        })
        .unwrap_or(FAULTS[0]);
    Plan {
        what,
        pick: rng.usize(0..60),
        length: Duration::from_millis(rng.u64(shortest..=longest)),
        // Mostly after the one before is over and forgotten, sometimes into the middle of it.
        gap: Duration::from_millis(if rng.u8(0..4) == 0 { 150 } else { rng.u64(400..2600) }),
        strength: match what {
            What::Delay => rng.u32(5..120),
            _ => rng.u32(20..60),
        },
    }
}

#[test]
fn a_seed_is_replayed_exactly_and_draws_every_kind() {
    let plans = |seed| {
        let mut rng = Rng::with_seed(seed);
        (0..2000).map(move |_| draw(&mut rng)).collect::<Vec<_>>()
    };
    assert_eq!(plans(7), plans(7));
    assert_ne!(plans(7), plans(8));
    for (what, ..) in FAULTS {
        assert!(plans(7).iter().any(|plan| plan.what == what), "{what:?}");
    }
}
