#!/usr/bin/env python3
"""Takes events from a broker until it is ended. Needs paho-mqtt 1.6 or 2: apt-get install python3-paho-mqtt

    consumer.py DB CLIENT_ID HOST:PORT [FILTER ...]      all events, or those of the filters
"""
import sys
import paho.mqtt.client as mqtt
from fold import connect, fold


def connected(client, userdata, flags, code, *_):
    print("broker:", mqtt.connack_string(code), file=sys.stderr)
    client.subscribe([(f, 1) for f in filters or ["postrider/v1/+/events/#"]])


def subscribed(client, userdata, mid, codes, *_):
    if any(getattr(code, "value", code) > 2 for code in codes):
        sys.exit("the broker refused a subscription")
    print("subscribed", file=sys.stderr)


path, client_id, address, *filters = sys.argv[1:] if len(sys.argv) > 3 else sys.exit(__doc__)
db, (host, _, port) = connect(path), address.rpartition(":")
api = [mqtt.CallbackAPIVersion.VERSION2] if hasattr(mqtt, "CallbackAPIVersion") else []  # what 2 asks for
client = mqtt.Client(*api, client_id=client_id, clean_session=False)  # the broker keeps what comes while we are away
client.on_connect, client.on_subscribe = connected, subscribed
# paho sends the PUBACK when on_message has returned. When it raises, paho sends none, and loop_forever raises too.
client.on_message = lambda client, userdata, message: fold(db, message.topic, message.payload)
client.connect_async(host, int(port))
client.loop_forever(retry_first_connection=True)
