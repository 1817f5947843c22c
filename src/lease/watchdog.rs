//! The thread that ends a lease by the clock when the owner thread cannot.
//!
//! The owner may be stuck in a statement, in name resolution, or starved. This thread does nothing
//! but wait for the deadline of the session that holds leases, so a job's token is set in time
//! whatever else happens. Waits are at most [`SLICE`] long, because they run on a clock that stops
//! in suspend while the deadline's does not.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};

use crate::error::Error;
use crate::event::{Event, Events};
use crate::lease::life::Life;

const SLICE: Duration = Duration::from_millis(500);

/// Parts of the time between a heartbeat's due and the loss after which it is called late.
const LATE: [f64; 2] = [0.5, 0.8];

/// Starts the thread. It watches the life that it was sent last, and ends when the sender is
/// dropped.
pub(crate) fn start(events: Events) -> Result<(Sender<Arc<Life>>, JoinHandle<()>), Error> {
    let (sender, lives) = unbounded::<Arc<Life>>();
    let thread = Builder::new()
        .name("leasehold-clock".into())
        .spawn(move || {
            let mut next = lives.recv().ok();
            while let Some(life) = next {
                next = watch(&life, &events, &lives);
            }
        })
        .map_err(|error| Error::Spawn(Arc::new(error)))?;
    Ok((sender, thread))
}

/// Watches one life until it ends or has no lease. Gives the next one to watch.
fn watch(life: &Life, events: &Events, lives: &Receiver<Arc<Life>>) -> Option<Arc<Life>> {
    let pace = life.pace;
    let mut warned = (life.last_good(), 0);
    while life.ended().is_none() && life.lease_count() > 0 {
        let last_good = life.last_good();
        if last_good > warned.0 {
            warned = (last_good, 0);
        }
        let silent = life.clock.now().since(last_good);
        let late = |step: usize| pace.heartbeat_interval + pace.query_timeout.mul_f64(LATE[step]);
        if warned.1 < LATE.len() && silent >= late(warned.1) {
            let overdue = silent.saturating_sub(pace.heartbeat_interval);
            let used = overdue.as_secs_f64() / pace.query_timeout.as_secs_f64();
            events.send(Event::Late { pid: life.pid(), used: used.min(1.0) });
            warned.1 += 1;
        }
        if life.end_if_passed() {
            break;
        }
        let end = pace.window();
        let next = if warned.1 < LATE.len() { late(warned.1) } else { end };
        let wait = next.saturating_sub(silent).clamp(Duration::from_millis(1), SLICE);
        match lives.recv_timeout(wait) {
            Ok(newer) => return Some(newer),
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
    lives.recv().ok()
}
