package mqtt_test

import (
	"context"
	"strings"
	"testing"

	"postrider/internal/mqtt"
)

func TestParseBroker(t *testing.T) {
	for in, want := range map[string]string{
		"localhost":                   "tcp://localhost:1883",
		"localhost:1884":              "tcp://localhost:1884",
		"tcp://10.0.0.1":              "tcp://10.0.0.1:1883",
		"mqtt://h/":                   "tcp://h:1883",
		"MQTT://h":                    "tcp://h:1883",
		"tls://h":                     "tls://h:8883",
		"mqtts://h:99":                "tls://h:99",
		"ws://h":                      "ws://h:80",
		"ws://h:8083/mqtt":            "ws://h:8083/mqtt",
		"wss://h/mqtt?token=x":        "wss://h:443/mqtt?token=x",
		"[::1]:1883":                  "tcp://[::1]:1883",
		"tcp://[::1]":                 "tcp://[::1]:1883",
		"tcp://user:p%40ss@h":         "tcp://user:p%40ss@h:1883",
		" localhost ":                 "tcp://localhost:1883",
		"my-broker.example.org:65535": "tcp://my-broker.example.org:65535",
	} {
		u, err := mqtt.ParseBroker(in)
		if err != nil {
			t.Errorf("%q: %v", in, err)
		} else if u.String() != want {
			t.Errorf("%q is read as %q, want %q", in, u, want)
		}
	}
	for _, in := range []string{
		"", " ", "http://h", "unix:///s", "ssl://h", "tcp://", ":1883", "h:0", "h:65536", "h:port", "h:-1", "::1", "tcp://::1:1883",
		"tcp://h/path", "tcp://h?q", "tcp://h#f", "ws://h/#f", "tcp://h:1:2", "a b", "h\n", "tcp://h:1883\x00", "://h", "tcp:h",
	} {
		if in == "h\n" {
			continue // trimmed
		}
		u, err := mqtt.ParseBroker(in)
		if err == nil {
			t.Errorf("%q is read as %q", in, u)
		} else if strings.ContainsAny(err.Error(), "\n") {
			t.Errorf("%q: more than one line: %v", in, err)
		}
	}
}

func TestBrokerErrorsHoldNoPassword(t *testing.T) {
	for _, in := range []string{
		"http://user:s3cret@h", "tcp://user:s3cret@h:99999", "tcp://user:s3cret%zz@h", "user:s3cret@h/path", "tcp://user:s3cret@",
		"tcp://user:s3c ret@h", "tcp://user:s3cret@h:x", "tcp://us er:s3cret@h", "tcp://user:s3cret/x@h", "tcp://user:s3cret#@h",
		"tcp://user:s3cret?x@h", "tcp://user:s3@cret@h:x",
	} {
		for _, err := range []error{func() error { _, err := mqtt.ParseBroker(in); return err }(), dialErr(in)} {
			if err != nil && (strings.Contains(err.Error(), "s3") || strings.Contains(err.Error(), "cret")) {
				t.Errorf("%q: %v", in, err)
			}
		}
	}
	err := dialErr("tcp://user:s3cret@" + freePort(t))
	if err == nil || strings.Contains(err.Error(), "s3cret") {
		t.Errorf("%v", err)
	}
}

func dialErr(broker string) error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	c, err := mqtt.Dial(ctx, mqtt.Options{Broker: broker, ClientID: "c"})
	if err == nil {
		c.Close()
	}
	return err
}

func TestPasswordNeedsAUserName(t *testing.T) {
	_, err := mqtt.Dial(context.Background(), mqtt.Options{Broker: "h", ClientID: "c", Password: "s3cret"})
	if err == nil || !strings.Contains(err.Error(), "user name") {
		t.Fatalf("%v", err)
	}
}
