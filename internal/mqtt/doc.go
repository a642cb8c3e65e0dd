// Package mqtt is the tuned MQTT 3.1.1 client of the relay and of the fold, and the only importer of paho.
//
// One value is one connection: it never reconnects, stores nothing and re-sends nothing; who needs a new connection
// dials again (the caller's supervisor is the only reconnector, the outbox the only queue). So a [Delivery] without an
// error means that the PUBACK came on this very connection, and nothing else: TestDeliveryNeedsPuback.
//
// A [Client] publishes with a clean session. A [Subscriber] receives with a kept session and acknowledges when its
// consumer says so. They never share a client id: packet ids of the two directions would collide in the broker.
//
// Files: options.go the address and the settings · open.go TCP, TLS, websocket · conn.go buffering, write progress,
// keepalive · session.go the life of a connection · client.go publishing · subscriber.go receiving · errors.go.
package mqtt
