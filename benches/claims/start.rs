//! From nothing to the first lease.

use std::time::Instant;

use leasehold::{CancellationToken, Lease, Locker, Options};

use crate::support::Server;
use crate::table::{self, Samples};

/// `Locker::new` to the job, proof of the endpoint included, against connect and one lock.
pub(crate) fn first_lease() {
    let server = Server::start();
    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    for _ in 0..60 {
        let start = Instant::now();
        let locker = Locker::new(server.config(), Options::new()).unwrap();
        let job = |_: &Lease| Ok::<_, ()>(Instant::now());
        let at = locker.try_run(&CancellationToken::new(), "bench", job).unwrap().unwrap();
        ours.push(at - start);
        locker.close();

        let start = Instant::now();
        let mut client = server.client();
        client.query_one("SELECT pg_try_advisory_lock($1)", &[&1_i64]).unwrap();
        bare.push(start.elapsed());
    }
    table::times("start to first job", &Samples::of(ours), &Samples::of(bare), "ratio <= 6");
}
