//! What sessions are asked for.

use super::*;

fn options(vanished_after: Duration) -> SessionOptions {
    SessionOptions {
        query_timeout: Duration::from_secs(1),
        idle_timeout: None,
        vanished_after,
        application_name: None,
        lock_timeout: None,
        listen: true,
    }
}

/// A server whose TCP gave up before the holder's own deadline would let two lead.
#[test]
fn keepalives_end_a_session_no_sooner_than_asked() {
    for millis in (100..60_000).step_by(50) {
        let vanished_after = Duration::from_millis(millis);
        let settings = settings(&options(vanished_after));
        let get = |name: &str| -> u64 {
            let setting = settings.iter().find(|(setting, _)| *setting == name).unwrap();
            setting.1.parse().unwrap()
        };
        let idle = get("tcp_keepalives_idle");
        let probes = get("tcp_keepalives_interval") * get("tcp_keepalives_count");
        assert!(Duration::from_secs(idle + probes) >= vanished_after, "{vanished_after:?}");
        assert!(Duration::from_millis(get("tcp_user_timeout")) >= vanished_after);
        // And not much later: each value is rounded up by less than a second.
        assert!(Duration::from_secs(idle + probes) < vanished_after + Duration::from_secs(4));
    }
}
