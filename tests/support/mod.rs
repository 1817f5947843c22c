//! Real servers, real processes, real faults.

pub mod child;
pub mod folders;
pub mod fork;
pub mod freeze;
pub mod history;
pub mod keeper;
pub mod leases;
pub mod look;
pub mod netns;
pub mod pgbouncer;
pub mod proxy;
pub mod server;
pub mod standby;
pub mod versions;

pub use child::Child;
pub use history::History;
pub use netns::Net;
pub use pgbouncer::PgBouncer;
pub use proxy::Proxy;
pub use server::Server;
pub use versions::ends_idle_sessions;
