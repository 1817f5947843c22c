//! The queue between those who cause events and the thread that tells them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};

use super::Event;
use crate::error::Error;

/// Called with each event, on a thread of its own.
pub(crate) type OnEvent = Arc<dyn Fn(&Event) + Send + Sync>;

/// How many events wait for a slow listener before more are dropped, and counted.
pub(crate) const QUEUE: usize = 4096;

/// Where events go: a queue, so that a slow logger or listener never delays a heartbeat.
#[derive(Clone, Debug)]
pub(crate) struct Events {
    /// `None` asks the thread to end.
    queue: Sender<Option<Event>>,
    dropped: Arc<AtomicU64>,
}

impl Events {
    /// Starts the thread that logs and calls `on_event`. It ends when the last clone is dropped and
    /// the queue is empty.
    pub(crate) fn start(
        on_event: Option<OnEvent>,
    ) -> Result<(Events, thread::JoinHandle<()>), Error> {
        let (queue, incoming) = bounded(QUEUE);
        let dropped = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&dropped);
        let thread = thread::Builder::new()
            .name("leasehold-event".into())
            .spawn(move || deliver(&incoming, &counter, on_event.as_ref()))
            .map_err(|error| Error::Spawn(Arc::new(error)))?;
        Ok((Events { queue, dropped }, thread))
    }

    /// Queues an event. Never blocks.
    pub(crate) fn send(&self, event: Event) {
        if let Err(TrySendError::Full(_)) = self.queue.try_send(Some(event)) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Ends the thread when it has told what is queued. Blocks until `end` if the queue is full.
    pub(crate) fn stop(&self, end: Instant) {
        if self.queue.send_deadline(None, end).is_err() {
            log::debug!(target: "leasehold", "events are not read, or not any more");
        }
    }
}

fn deliver(incoming: &Receiver<Option<Event>>, dropped: &AtomicU64, on_event: Option<&OnEvent>) {
    for event in incoming.iter().map_while(|event| event) {
        tell(&event, on_event);
        let count = dropped.swap(0, Ordering::Relaxed);
        if count > 0 {
            tell(&Event::Dropped { count }, on_event);
        }
    }
}

fn tell(event: &Event, on_event: Option<&OnEvent>) {
    log::log!(target: "leasehold", event.level(), "{event}");
    let Some(on_event) = on_event else { return };
    // A listener that panics must not silence the ones after it.
    let call = std::panic::AssertUnwindSafe(|| on_event(event));
    if std::panic::catch_unwind(call).is_err() {
        log::error!(target: "leasehold", "on_event panicked; events go on");
    }
}

#[cfg(test)]
#[cfg(not(leasehold_loom))]
mod tests {
    use super::*;
    use crate::key::Key;
    use std::sync::Mutex;
    use std::sync::mpsc::channel;

    fn waiting(i: usize) -> Event {
        Event::Waiting { name: format!("n{i}").into(), key: Key::from_i64(0) }
    }

    #[test]
    fn events_arrive_in_order_and_the_thread_ends_with_the_last_handle() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        let on_event: OnEvent = Arc::new(move |e| log.lock().unwrap().push(e.to_string()));
        let (events, thread) = Events::start(Some(on_event)).unwrap();
        (0..100).for_each(|i| events.send(waiting(i)));
        drop(events);
        thread.join().unwrap();
        let expected: Vec<String> = (0..100).map(|i| waiting(i).to_string()).collect();
        assert_eq!(*seen.lock().unwrap(), expected);
    }

    #[test]
    fn a_stuck_listener_never_blocks_the_sender_and_is_told_what_it_missed() {
        let (release, gate) = channel::<()>();
        let gate = Mutex::new(gate);
        let missed = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&missed);
        let on_event: OnEvent = Arc::new(move |event| match event {
            Event::Dropped { count: n } => {
                count.fetch_add(*n, Ordering::SeqCst);
            }
            _ => drop(gate.lock().unwrap().recv()),
        });
        let (events, thread) = Events::start(Some(on_event)).unwrap();
        (0..QUEUE + 100).for_each(|i| events.send(waiting(i)));
        drop(release);
        drop(events);
        thread.join().unwrap();
        let missed = missed.load(Ordering::SeqCst);
        assert!((99..=100).contains(&missed), "{missed}");
    }

    #[test]
    fn a_listener_that_panics_hears_the_next_event() {
        let calls = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&calls);
        let on_event: OnEvent = Arc::new(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
            panic!("a listener's panic, part of the test");
        });
        let (events, thread) = Events::start(Some(on_event)).unwrap();
        (0..3).for_each(|i| events.send(waiting(i)));
        drop(events);
        thread.join().unwrap();
        assert_eq!(calls.load(Ordering::SeqCst), 3);
    }
}
