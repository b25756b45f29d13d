#!/usr/bin/env python3
"""page_test SERVER DEMO: the status page in headless Chromium, against a real server that has served the demo.

Runs where Chromium is installed (tests/CMakeLists.txt).
"""
import pathlib
import subprocess
import sys
import unittest

import browser
from server import Server

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SERVER, DEMO = sys.argv.pop(1), sys.argv.pop(1)
TEXT = "document.body.innerText"


class StatusPage(unittest.TestCase):
    def test_shows_what_the_server_says(self):
        with Server(SERVER) as server, browser.Page(server.url()) as page:
            page.wait(f"{TEXT}.includes('no models are registered')")
            subprocess.run(
                [DEMO, "--server", server.address, "--tokens", "8", "--seed", "3",
                 "--weights", ROOT / "client/demo/weights/hybrid-kjv.safetensors",
                 "--text", ROOT / "client/demo/text/heldout.txt"], check=True, stdout=subprocess.DEVNULL)
            status = server.status()  # nothing changes any more but ages
            model, = status["models"]
            self.assertGreater(model["tokens_accepted"], 0)
            page.value("document.body.dataset.readings = 0")
            page.wait("Number(document.body.dataset.readings) >= 2")
            text = page.value(TEXT)
            for part in (model["name"], model["id"], "serving",
                         f"{model['tokens_accepted']:,} of {model['tokens_drafted']:,}",
                         f"{100 * model['tokens_accepted'] / model['tokens_drafted']:.1f} %",
                         f"{model['pages_total'] - model['pages_free']} of {model['pages_total']}",
                         f"{model['snapshots'][0]['count']} of {model['snapshots'][0]['max']}",
                         f"{model['flushes']['fused']:,}",
                         f"{model['steps_committed']:,}, {model['steps_aborted']:,}",
                         f"{status['sessions']['open']} open of {status['sessions']['max']:,}"):
                self.assertIn(part, text)
            positions = page.value("document.querySelectorAll('.positions > div').length")
            self.assertEqual(positions, len(model["tokens_accepted_by_position"]))
            self.assertEqual(page.value("document.querySelectorAll('polyline').length"), 2)
            self.assertEqual(page.errors, [])

    def test_follows_the_colour_scheme_and_the_width(self):
        with Server(SERVER) as server, browser.Page(server.url()) as page:
            page.wait("document.body.dataset.readings > 0")
            back = "getComputedStyle(document.body).backgroundColor"
            light = page.value(back)
            page.scheme("dark")
            page.wait(f"{back} !== {light!r}")
            page.size(360, 700)
            page.wait("innerWidth === 360")
            self.assertLessEqual(page.value("document.documentElement.scrollWidth"), 360)
            self.assertEqual(page.errors, [])

    def test_says_when_the_server_is_away(self):
        with Server(SERVER) as server, browser.Page(server.url()) as page:
            page.wait("document.getElementById('state').textContent === 'serving'")
            server.kill()
            page.wait("document.getElementById('state').textContent === 'away'")

    def test_fetches_nothing_from_elsewhere(self):
        with Server(SERVER) as server:
            text = server.get("/")[1]
            for word in ("http:", "https:", "src=", "@import", "url("):
                self.assertNotIn(word, text.replace("http://www.w3.org/2000/svg", ""))


if __name__ == "__main__":
    unittest.main()
