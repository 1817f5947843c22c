//! From one lease to five thousand on one session.

use std::time::{Duration, Instant};

use leasehold::{LeaseGuard, Locker, Options};

use crate::support::{Server, look};

pub(crate) fn curve() {
    println!(
        "\n{:<10}{:>14}{:>14}{:>16}{:>14}",
        "leases", "acquire all", "per lease", "heartbeat", "release all"
    );
    for n in [1_usize, 10, 100, 1_000, 5_000] {
        let server = Server::start();
        let locker = Locker::new(server.config(), Options::new()).unwrap();
        locker.ping().unwrap();
        let start = Instant::now();
        let guards: Vec<LeaseGuard> =
            (0..n).map(|n| locker.try_acquire(&format!("bench-{n}")).unwrap().unwrap()).collect();
        let acquired = start.elapsed();
        let mut beats: Vec<Duration> = (0..20)
            .map(|_| {
                let start = Instant::now();
                locker.ping().unwrap();
                start.elapsed()
            })
            .collect();
        beats.sort();
        let start = Instant::now();
        drop(guards);
        look::wait_until("all are released", Duration::from_secs(60), || {
            look::advisory_locks(&mut server.client()).is_empty()
        });
        let released = start.elapsed();
        println!(
            "{n:<10}{:>14}{:>14}{:>16}{:>14}",
            format!("{acquired:.1?}"),
            format!("{:.1?}", acquired / u32::try_from(n).unwrap()),
            format!("{:.2?}", beats[10]),
            format!("{released:.1?}"),
        );
    }
}
