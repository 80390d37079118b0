//! The model store keeps every law of the port.

use leasehold_core::store::conformance;
use leasehold_core::store::model::Model;

#[test]
fn the_model_conforms() {
    conformance::run(|| Model::new(1_700_000_000_000_000));
}
